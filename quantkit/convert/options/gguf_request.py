"""Options of ``--format gguf``: what goes with it, what it decides, and what it refuses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.algorithms import OF_BLOCKS
from quantkit.convert.gguf.types import FLOATS, MIXED, MIXES, NAMED, mix_name
from quantkit.errors import RequestError

Options = Any
"""Those of a conversion (``ConvertOptions``, which imports this module)."""


def check_gguf(options: Options) -> None:
    """Check the options that belong to ``--format gguf``, and that nothing contradicts it.

    Raises RequestError for the first that does.
    """
    if options.format != "gguf":
        for name, value in (("gguf-type", options.gguf_type), ("imatrix", options.imatrix)):
            if value is not None:
                raise RequestError(f"--{name} {value}: goes with --format gguf. Add that, or leave it out.")
        if options.method == "kquant":
            raise RequestError(
                "--method kquant searches scales of GGUF's block formats. Add --format gguf --gguf-type q4_k_m, or use"
                " --method gptq or awq."
            )
        return
    if options.gguf_type is None:
        return  # what is quantized already needs none: ``require_gguf_type``
    object.__setattr__(options, "gguf_type", mix_name(options.gguf_type))
    if options.allocates != (options.gguf_type == MIXED):
        raise RequestError(
            f"--gguf-type {options.gguf_type} with {options.target}: the size decides which type each tensor gets."
            " Leave one of them out."
            if options.allocates
            else "--gguf-type mixed: for which size? Add --target-bpw 4.5, or name a type such as q4_k_m."
        )
    if options.method not in OF_BLOCKS:
        preset = "" if options.preset is None else f" (preset {options.preset})"
        raise RequestError(
            f"--format gguf: --method {options.method}{preset} finds no scales for GGUF's blocks. Methods:"
            f" {', '.join(OF_BLOCKS)}; --preset balanced goes with it, too."
        )
    _refuse_others(options)
    if options.imatrix is not None:
        if is_float(options):
            raise RequestError(f"--imatrix: --gguf-type {options.gguf_type} rounds to nothing that it could weigh.")
        if options.method != "kquant":
            raise RequestError(
                f"--imatrix with --method {options.method}: the file weighs inputs for --method kquant alone. Leave one"
                " of them out."
            )
        if options.rotate:
            raise RequestError(
                "--imatrix with --rotate: the file weighs channels of the model as it was. Leave one out."
            )
        if not Path(options.imatrix).is_file():
            raise RequestError(f"--imatrix {options.imatrix}: no such file. `quantkit imatrix` makes one.")


def require_gguf_type(options: Options) -> None:
    """Raise RequestError for ``--format gguf`` without a type: weights that are to be rounded need one."""
    if options.format == "gguf" and options.gguf_type is None:
        raise RequestError(
            f"--format gguf: which type? Add --gguf-type q4_k_m, or one of: {', '.join(NAMED)}; or a size, from which"
            " types follow: --target-bpw 4.5."
        )


def _refuse_others(options: Options) -> None:
    """Raise RequestError for an option that a GGUF file cannot keep, or that has not landed for it."""
    wrong = {
        "--kv-bits, --kv-budget: a GGUF file has no place for the cache's scheme. llama.cpp takes it as --cache-type-k"
        " and --cache-type-v when it runs": options.cache.wanted,
        "--activations: llama.cpp rounds activations its own way": options.activations is not None,
        f"--rule: --gguf-type {options.gguf_type} rounds nothing": bool(options.rules) and is_float(options),
        "--distil: learns scales of integer schemes": bool(options.distil),
        "--quantize-mtp: layers that predict further tokens are not written as GGUF": options.quantize_mtp,
        "--gptaq: its blocks do not follow the original model's inputs": options.gptaq,
        "--scales minmax: GGUF's blocks always get searched scales": options.scales != "search",
    }
    for reason, given in wrong.items():
        if given:
            raise RequestError(f"--format gguf with {reason}. Leave it out.")


def is_float(options: Options) -> bool:
    """Return True if the type is one that rounds to no codes."""
    return options.gguf_type is not None and MIXES[options.gguf_type][1] in FLOATS


def apply_gguf(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the method that a GGUF type or an importance matrix stands for, where none is given.

    given: the options that were written out.

    Raises RequestError for a method beside a type that rounds to no codes.
    """
    if given.get("format") != "gguf":
        return {}
    if given.get("gguf_type") is None:
        sized = given.get("target_bpw") is not None or given.get("target_size") is not None
        return {"gguf_type": MIXED} | _searched(given) if sized else {}
    if MIXES[mix_name(given["gguf_type"])][1] in FLOATS:
        if given.get("method", "rtn") != "rtn":
            raise RequestError(
                f"--method {given['method']} has no effect: --gguf-type {given['gguf_type']} rounds to no codes. Leave"
                " it out."
            )
        return {"method": "rtn"}
    return _searched(given)


def _searched(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"method": "kquant"} if given.get("imatrix") is not None and "method" not in given else {}


DECIDED = ("bits", "group_size", "symmetric", "scale_dtype", "strict_groups")


def decided_by_type(options: Options) -> dict[str, str]:
    """Return the options that a GGUF type decides, with the reason."""
    return dict.fromkeys(DECIDED, f"--gguf-type {options.gguf_type} decides it")


def unsaid(options: Options) -> tuple[str, ...]:
    """Return the options that are in no manifest of this format."""
    if options.format == "gguf":
        return ("bits", "group_size", "symmetric", "scales", "scale_dtype", *(() if options.imatrix else ("imatrix",)))
    return ("gguf_type", "imatrix")


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
