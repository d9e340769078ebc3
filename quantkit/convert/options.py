"""What was asked for: the options of one conversion, validated once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit import algorithms
from quantkit.calibrate.products import MODES
from quantkit.convert.cache import CacheRequest, request
from quantkit.convert.rules import parse_rules
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError
from quantkit.formats import writer_format

# Options of the command line whose capability has not landed: refused by name, never ignored.
NOT_LANDED = ("target_bpw", "target_size")


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Raises RequestError for any value outside its range, with the remedy."""

    source: str
    out: Path
    method: str = "gptq"
    bits: int = 4
    group_size: int | str | None = 128
    symmetric: bool = False
    scales: str = "search"
    scale_dtype: str = "float16"
    activations: str | None = None  # "int8": see core.scheme
    rules: tuple[str, ...] = ()  # quantkit.convert.rules
    format: str = "compressed-tensors"
    kv_bits: int | str = 16  # see core.kvscheme.KVScheme.of
    kv_scales: str = "online"
    kv_budget: float | None = None  # bits on average, instead of kv_bits
    calibration: str = "wikipedia-sample"
    samples: int = 128
    seq_len: int = 1024
    damping: float = 0.01
    seed: int = 0
    strict_groups: bool = False
    overwrite: bool = False
    device: str = "auto"
    products: str = "auto"  # of float32 matrices: see calibrate.products
    resume: bool = False
    work_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.method not in algorithms.METHODS:
            later = self.method in algorithms.LATER
            raise RequestError(
                f"--method {self.method}: {'has not landed yet' if later else 'no such method'}. "
                f"Methods: {', '.join(algorithms.METHODS)}."
            )
        if self.group_size == "channel":  # the command line's word for it
            object.__setattr__(self, "group_size", None)
        if self.activations == "none":
            object.__setattr__(self, "activations", None)
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"--seed {self.seed}: a whole number from 0 to 2**63 - 1.")
        if isinstance(self.rules, list):
            object.__setattr__(self, "rules", tuple(self.rules))
        self.scheme  # noqa: B018  (validates bits, group size and scale dtype)
        if self.method == "smooth" and self.activations is None:
            raise RequestError(
                "--method smooth moves outliers of int8 activations into the weights; 16-bit activations have no use for it. "
                "Add --activations int8, or use --method awq or gptq."
            )
        parse_rules(self.rules, self.scheme)
        writer_format(self.format)
        if self.scales not in ("search", "minmax"):
            raise RequestError(f"--scales {self.scales}: choose 'search' or 'minmax'.")
        object.__setattr__(self, "kv_bits", self.cache.scheme.label)
        self.cache.check_windows(self.seq_len)
        if self.products not in ("auto", *MODES):
            raise RequestError(f"--products {self.products}: choose auto, {', '.join(MODES[:-1])} or {MODES[-1]}.")
        if self.samples < 1 or self.seq_len < 2:
            raise RequestError(
                f"--samples {self.samples} --seq-len {self.seq_len}: at least 1 window of 2 tokens is needed."
            )
        if not 0 < self.damping <= 1:
            raise RequestError(
                f"--damping {self.damping}: a share of the Hessian's mean diagonal, above 0 and at most 1."
            )

    @property
    def scheme(self) -> Scheme:
        size: Any = self.group_size
        return Scheme(self.bits, size, self.symmetric, self.scale_dtype, self.activations)

    @property
    def cache(self) -> CacheRequest:
        """What was asked for the KV cache."""
        scales: Any = self.kv_scales
        return request(self.kv_bits, scales, self.kv_budget)

    @property
    def work_folder(self) -> Path:
        """Where a job keeps what it has done so far: the same folder each time the job is started."""
        return Path(self.work_dir) if self.work_dir is not None else self.out.parent / f".{self.out.name}.work"

    @property
    def needs_data(self) -> bool:
        """True if calibration text is read: for the method's statistics, or for the scales of the KV cache."""
        return self.method in algorithms.CALIBRATED or self.cache.wanted

    @property
    def paired(self) -> bool:
        """True if the original model's states are kept beside the quantized ones."""
        return self.method in algorithms.PAIRED

    def for_manifest(self) -> dict[str, Any]:
        """What decides the bytes of the result (where it is written does not)."""
        data = asdict(self)
        data["rules"] = list(self.rules)
        # source and text are identified by their hashes: a path would change the bytes and tell where they lay
        for key in (
            "source",
            "calibration",
            "out",
            "overwrite",
            "strict_groups",
            "device",
            "products",
            "resume",
            "work_dir",
        ):
            data.pop(key)
        if not self.needs_data:
            for key in ("samples", "seq_len"):
                data.pop(key)
        return data


# What a preset sets; an option that was given wins, another method contradicts.
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"method": "rtn", "scales": "search"},
    "balanced": {"method": "gptq", "scales": "search"},
}
PRESETS_LATER = ("best",)


# What --activations int8 sets: the only weights that go with it.
INT8_ACTIVATIONS: dict[str, Any] = {"bits": 8, "group_size": None, "symmetric": True}


def apply_activations(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that ``activations="int8"`` adds to those that were given; one that contradicts it is refused later, by the scheme."""
    if given.get("activations") in (None, "none"):
        return {}
    return {name: value for name, value in INT8_ACTIVATIONS.items() if name not in given}


def apply_preset(preset: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options a preset adds to those that were given. Raises RequestError for an unknown preset or a contradiction."""
    if preset is None:
        return {}
    if preset not in PRESETS:
        what = "has not landed yet" if preset in PRESETS_LATER else "is no preset"
        raise RequestError(f"--preset {preset}: {what}. Presets: {', '.join(PRESETS)}.")
    chosen = PRESETS[preset]
    method = given.get("method", chosen["method"])
    if method != chosen["method"]:
        raise RequestError(
            f"--preset {preset} with --method {method}: the preset is --method {chosen['method']}. Leave one of them out."
        )
    return {name: value for name, value in chosen.items() if name not in given}


def refuse_without_effect(given: Iterable[str], options: ConvertOptions) -> None:
    """Options that were given and would do nothing are refused: silence would look like obedience.

    given: the names that were written out, whatever their values. Raises RequestError that names all of them.
    """
    useless: dict[str, str] = {}
    if options.method == "awq" and options.scales == "minmax":
        useless["damping"] = "--method awq --scales minmax takes no ranges from statistics"
    if options.method not in algorithms.CALIBRATED:
        useless["damping"] = f"--method {options.method} uses no statistics"
    if options.method == "smooth":
        useless["damping"] = "--method smooth rounds without a Hessian"
    if not options.needs_data:
        useless |= dict.fromkeys(
            ("calibration", "samples", "seq_len", "seed", "products"), f"--method {options.method} reads no text"
        )
    if not options.cache.wanted:
        useless["kv_scales"] = (
            "--kv-bits 16 keeps the cache as it is (a cache with scales needs --kv-bits 8, 4, 3, 2 or k4v2)"
        )
    if options.kv_bits == "fp8":
        useless["kv_scales"] = "--kv-bits fp8 has scales of its own"
    if options.kv_budget is not None:
        useless["kv_bits"] = "--kv-budget chooses the bits"
    found = [name for name in useless if name in set(given)]
    if found:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in found)
        reasons = "; ".join(dict.fromkeys(useless[name] for name in found))
        verb, them = ("has", "it") if len(found) == 1 else ("have", "them")
        raise RequestError(f"{flags} {verb} no effect: {reasons}. Leave {them} out.")


def refuse_not_landed(options: Mapping[str, Any]) -> None:
    """Raises RequestError for an option that was given and whose capability has not landed."""
    for name in NOT_LANDED:
        if options.get(name):
            raise RequestError(f"--{name.replace('_', '-')}: this capability has not landed yet. Leave the option out.")
