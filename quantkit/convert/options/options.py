"""The options of one conversion, validated once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from quantkit import algorithms
from quantkit.calibrate.matmul_precision import MODES
from quantkit.convert.options.float_schemes import check_scheme
from quantkit.convert.options.gguf_request import check_gguf, file_sha256, unsaid
from quantkit.convert.options.kv_request import CacheRequest, request
from quantkit.convert.options.presets import AUTO, PRESETS, check_preset
from quantkit.convert.options.rules import parse_rules
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError
from quantkit.formats import writer_format

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The options of one conversion.

    Raises RequestError for any value outside its range, with the remedy.
    """

    source: str
    out: Path
    _: KW_ONLY
    # the name that was asked for; what it stands for is in the other options, see apply_preset
    preset: str | None = None
    method: str = "gptq"
    # Floating-point numbers instead of integers, see options.float_schemes.
    scheme: str | None = None
    bits: int = 4
    # With a target: what all groups have, or "auto": chosen with the bits.
    group_size: int | str | None = 128
    # Bits per weight of the whole checkpoint, instead of bits.
    target_bpw: float | None = None
    # Its tensors' bytes: 3_500_000_000 or "3.5GB".
    target_size: int | str | None = None
    symmetric: bool = False
    scales: str = "search"
    scale_dtype: str = "float16"
    # "int8": see core.scheme.
    activations: str | None = None
    # quantkit.convert.options.rules.
    rules: tuple[str, ...] = ()
    format: str = "compressed-tensors"
    # With format gguf: see convert.gguf.types.
    gguf_type: str | None = None
    # A file of llama.cpp's importance matrix, instead of a text: --method kquant.
    imatrix: str | Path | None = None
    # See core.kvscheme.KVScheme.of.
    kv_bits: int | str = 16
    kv_scales: str = "online"
    # Bits on average, instead of kv_bits.
    kv_budget: float | None = None
    calibration: str = "wikipedia-sample"
    samples: int = 128
    seq_len: int = 1024
    damping: float = 0.01
    # gptq: scale channels first, by AWQ's search.
    fold: bool = False
    # gptq: tokens count by what they mean to the model's output, see algorithms.guide.
    guided: bool = False
    # Residual stream and values, see model.rotate.
    rotate: bool = False
    # gptq: aim at what the original model's inputs give.
    gptaq: bool = False
    # Of learning, per block: --method tune.
    tune_steps: int = 120
    # Layers that predict further tokens too.
    quantize_mtp: bool = False
    # Windows of the end-to-end pass, see convert.distil; 0: none.
    distil: int = 0
    # A source that is no 16-bit original keeps its numbers, in another format, see convert.repack.
    repack: bool = False
    # What the format of a repack cannot keep is rounded, see convert.repack.fit.
    allow_rounding: bool = False
    # A quantized source becomes a dense checkpoint, in this dtype, see convert.repack.dequantize.
    dequantize: bool = False
    dtype: str = "auto"
    seed: int = 0
    strict_groups: bool = False
    overwrite: bool = False
    device: str = "auto"
    # Of float32 matrices: see calibrate.matmul_precision.
    matmul_precision: str = "auto"
    resume: bool = False
    work_dir: Path | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        check_preset(self.preset)
        if self.method not in algorithms.METHODS:
            later = "has not landed yet" if self.method in algorithms.LATER else "no such method"
            here = algorithms.ELSEWHERE.get(str(self.method))
            raise RequestError(
                f"--method {self.method}: {later if here is None else f'--method {here} does that here'}. "
                f"Methods: {', '.join(algorithms.METHODS)}."
            )
        if self.group_size == "channel":  # the command line's word for it
            object.__setattr__(self, "group_size", None)
        if self.activations == "none":
            object.__setattr__(self, "activations", None)
        self._check_target()
        check_scheme(self)
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"--seed {self.seed}: a whole number from 0 to 2**63 - 1.")
        if isinstance(self.rules, list):
            object.__setattr__(self, "rules", tuple(self.rules))
        self.base_scheme  # noqa: B018  (validates bits, group size and scale dtype)
        if self.method == "smooth" and self.activations is None:
            raise RequestError(
                "--method smooth moves outliers of int8 activations into the weights; 16-bit activations have no use"
                " for it. Add --activations int8, or use --method awq or gptq."
            )
        parse_rules(self.rules, self.base_scheme, blocks=self.format == "gguf")
        writer_format(self.format)
        check_gguf(self)
        if self.scales not in ("search", "minmax"):
            raise RequestError(f"--scales {self.scales}: choose 'search' or 'minmax'.")
        object.__setattr__(self, "kv_bits", self.cache.scheme.label)
        self.cache.check_windows(self.seq_len)
        if self.matmul_precision not in ("auto", *MODES):
            raise RequestError(
                f"--matmul-precision {self.matmul_precision}: choose auto, {', '.join(MODES[:-1])} or {MODES[-1]}."
            )
        if self.samples < 1 or self.seq_len < 2:
            raise RequestError(
                f"--samples {self.samples} --seq-len {self.seq_len}: at least 1 window of 2 tokens is needed."
            )
        if self.method == "tune" and self.activations == "int8":
            raise RequestError(
                "--method tune learns with 16-bit activations; --activations int8 goes with --method smooth, gptq, awq"
                " or rtn."
            )
        if not 1 <= self.tune_steps <= 100_000:
            raise RequestError(f"--tune-steps {self.tune_steps}: a whole number from 1 to 100000.")
        self._check_distil()
        if not 0 < self.damping <= 1:
            raise RequestError(
                f"--damping {self.damping}: a share of the Hessian's mean diagonal, above 0 and at most 1."
            )

    def _check_numbers(self) -> None:
        """Check the types of numbers: from Python a number in quotes could pass comparisons, or none."""
        for option in fields(self):
            value, kind = getattr(self, option.name), str(option.type)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if kind == "int" and not whole:
                raise RequestError(f"--{option.name.replace('_', '-')} {value!r}: a whole number.")
            if kind.startswith("float") and not (
                whole or isinstance(value, float) or (value is None and "None" in kind)
            ):
                raise RequestError(f"--{option.name.replace('_', '-')} {value!r}: a number.")

    def _check_target(self) -> None:
        if self.target_bpw is not None and self.target_size is not None:
            raise RequestError("--target-bpw and --target-size say the same in two ways. Leave one of them out.")
        if self.target_bpw is not None and not 0 < self.target_bpw <= 32:
            raise RequestError(
                f"--target-bpw {self.target_bpw:g}: bits per weight of the whole model, from about 2 to 16."
            )
        if self.target_size is not None:
            object.__setattr__(self, "target_size", parse_size(self.target_size))
        if self.allocates and self.activations is not None:
            raise RequestError(
                f"{self.target}: --activations int8 goes with 8 bits only, there is nothing to choose. Leave one of"
                " them out."
            )
        if self.group_size == AUTO and not self.allocates:
            raise RequestError(
                "--group-size auto: only --target-bpw and --target-size choose group sizes. Give a number or 'channel'."
            )

    @property
    def allocates(self) -> bool:
        """Whether bits are chosen by measured sensitivity, within a size."""
        return self.target_bpw is not None or self.target_size is not None

    @property
    def target(self) -> str:
        """The requested size in the words of the command line, in a unit that people read."""
        if self.target_bpw is not None:
            return f"--target-bpw {self.target_bpw:g}"
        assert isinstance(self.target_size, int)
        unit = next((unit for unit in ("TB", "GB", "MB", "kB") if self.target_size >= UNITS[unit.upper()]), "B")
        return f"--target-size {self.target_size / UNITS[unit.upper()]:.4g} {unit}"

    def _check_distil(self) -> None:
        if self.distil < 0 or self.distil == 1:
            raise RequestError(f"--distil {self.distil}: a number of windows, 2 or more; 0 for no end-to-end pass.")
        if self.distil and self.activations is not None:
            raise RequestError(
                "--distil with --activations int8: the end-to-end pass has no gradient through rounded activations."
                " Leave one of them out."
            )

    @property
    def base_scheme(self) -> Scheme:
        """The scheme of weights without a rule; with a target, what rules start from and all options have in common."""
        size: Any = 128 if self.group_size == AUTO else self.group_size
        if self.scheme is not None:
            named = Scheme.of(self.scheme)
            return replace(named, scale_dtype=self.scale_dtype, activations=self.activations)
        return Scheme(self.bits, size, self.symmetric, self.scale_dtype, self.activations)

    @property
    def scheme_words(self) -> str:
        """What was asked for, for people: a scheme, a size, a GGUF type."""
        if self.allocates:
            return self.target
        return self.base_scheme.describe() if self.gguf_type is None else self.gguf_type.upper()

    @property
    def method_options(self) -> dict[str, Any]:
        """The options that belong to the method, or were taken out of a preset.

        These decide how codes are found and have no line of their own in a plan.
        """
        in_preset = {} if self.preset is None else PRESETS[self.preset]
        return {
            name: getattr(self, name)
            for name in ("fold", "guided", "gptaq", "rotate", "tune_steps", "distil")
            if (self.method == "tune" if name == "tune_steps" else getattr(self, name) or in_preset.get(name))
        }

    @property
    def cache(self) -> CacheRequest:
        """The requested KV cache."""
        scales: Any = self.kv_scales
        return request(self.kv_bits, scales, self.kv_budget)

    @property
    def work_folder(self) -> Path:
        """The folder that a job keeps its progress in: the same one each time the job is started."""
        return Path(self.work_dir) if self.work_dir is not None else self.out.parent / f".{self.out.name}.work"

    @property
    def needs_data(self) -> bool:
        """Whether calibration text is read: for the method's statistics, or for the scales of the KV cache."""
        writes = self.distil > 0 and self.calibration == "self"  # windows that the pass after the blocks takes
        return self.calibrated or self.cache.wanted or writes

    @property
    def informed(self) -> bool:
        """Whether the method knows how large inputs are: from a text, or from a file."""
        return self.method in algorithms.CALIBRATED

    @property
    def calibrated(self) -> bool:
        """Whether the method takes statistics of a text: it does unless a file has them."""
        return self.method in algorithms.CALIBRATED and self.imatrix is None

    @property
    def paired(self) -> bool:
        """Whether the original model's states are kept beside the quantized ones."""
        return self.method in algorithms.PAIRED or self.gptaq

    @property
    def correlations(self) -> bool:
        """Whether correlations between inputs are read: by the method, by AWQ's factors, or to follow the original."""
        own = self.method in algorithms.CORRELATED or self.crossed
        return own or (self.folds and self.method not in algorithms.SIZES_ALONE)

    @property
    def folds(self) -> bool:
        """Whether channels are scaled before rounding."""
        return self.method in algorithms.FOLDING or self.fold

    @property
    def crossed(self) -> bool:
        """Whether the method compares inputs with the original model's in their place (``InputGroup.cross``)."""
        return self.gptaq

    @property
    def draws(self) -> bool:
        """Whether random tokens stand in for a text."""
        return self.method in algorithms.DRAWN and not self.needs_data

    def for_manifest(self) -> dict[str, Any]:
        """Return the options that decide the bytes of the result (the place where it is written does not)."""
        data = asdict(self)
        data["rules"] = list(self.rules)
        # source and text are identified by their hashes: a path would change the bytes and tell where they lay
        for key in (
            "source",
            "preset",  # a name for options that are here
            "calibration",
            "out",
            "overwrite",
            "strict_groups",
            "device",
            "matmul_precision",
            "resume",
            "work_dir",
            "repack",
            "allow_rounding",
            "dequantize",
            "dtype",
        ):
            data.pop(key)
        if self.scheme is None:
            data.pop("scheme")
        for key in unsaid(self):
            data.pop(key)
        if self.imatrix is not None:
            data["imatrix"] = file_sha256(Path(self.imatrix))
        if self.method != "tune":
            data.pop("tune_steps")
        if not self.quantize_mtp:
            data.pop("quantize_mtp")
        if not (self.needs_data or self.allocates):
            data.pop("samples")
            if not self.distil:
                data.pop("seq_len")
        for key in ("bits",) if self.allocates else ("target_bpw", "target_size"):
            data.pop(key, None)
        return data


DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(ConvertOptions)}


def parse_size(text: int | str) -> int:
    """Return a size in bytes.

    text: a number of bytes, or a number with a unit.

    Raises RequestError for anything else.

    >>> parse_size("3.5GB"), parse_size("1 GiB"), parse_size(77)
    (3500000000, 1073741824, 77)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].upper() not in UNITS or not float(match[1]) > 0:
        raise RequestError(f"--target-size {text}: a size such as 3.5GB, 700MB or 1.2GiB.")
    return int(Decimal(match[1]) * UNITS[match[2].upper()])  # 16.002 KB are 16,002 bytes


def method_words(method: str, options: Mapping[str, Any], preset: str | None) -> str:
    """Spell a method with its ``ConvertOptions.method_options`` as they are typed.

    method: the name of the method.
    options: as ``ConvertOptions.method_options`` gives them.
    preset: the preset that they come from, None without one.

    >>> method_words("gptq", {"fold": True, "distil": 8}, "balanced")
    'gptq --fold --distil 8 (preset balanced)'
    """
    flags = {name: name.replace("_", "-") for name in options}
    typed = [
        (
            (f"--{flags[name]}" if value else f"--no-{flags[name]}")
            if isinstance(value, bool)
            else f"--{flags[name]} {value}"
        )
        for name, value in options.items()
    ]
    return " ".join([method, *typed]) + ("" if preset is None else f" (preset {preset})")
