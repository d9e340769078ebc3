"""``--scheme NAME``: the options that a scheme stands for, and those that it does not go with.

FP8, NVFP4 and MXFP4 in compressed-tensors; the schemes of bitsandbytes: ``bitsandbytes_request.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.convert.options.bitsandbytes_request import FORMAT, check_bitsandbytes
from quantkit.core.scheme import OF_BITSANDBYTES, Scheme
from quantkit.errors import RequestError

SET = ("bits", "group_size", "symmetric")  # a scheme fixes these
METHODS = ("gptq", "awq", "tune", "rtn")  # that round to a scheme's numbers
USUAL_ACTIVATIONS = {"fp8": "fp8", "fp8-block": "fp8", "fp8-tensor": "fp8"}


def apply_scheme(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that ``scheme`` adds to those that were given.

    Activations of the fp8 schemes are fp8 unless they are given (``none``: weights only).

    given: the options that were written out.

    Raises RequestError for an unknown scheme, and for an option that says otherwise.
    """
    name = given.get("scheme")
    if name is None:
        return {}
    scheme = Scheme.of(str(name))
    for option in SET:
        wanted = given.get(option, getattr(scheme, option))
        wanted = None if option == "group_size" and wanted == "channel" else wanted
        if wanted != getattr(scheme, option):
            typed = f"--{option.replace('_', '-')} {'channel' if wanted is None else wanted}"
            if option == "symmetric":
                typed = "--asym"
            raise RequestError(f"{typed}: --scheme {name} is {scheme.describe()}. Leave one of them out.")
    chosen = {option: getattr(scheme, option) for option in (*SET, "scale_dtype")}
    chosen["activations"] = USUAL_ACTIVATIONS.get(str(name))
    if name in OF_BITSANDBYTES:
        chosen["method"] = "rtn"
    return {option: value for option, value in chosen.items() if option not in given}


def check_scheme(options: Any) -> None:
    """Refuse what does not go with ``--scheme``.

    options: ``ConvertOptions``.

    Raises RequestError with the remedy.
    """
    if options.format == FORMAT or options.scheme in OF_BITSANDBYTES:
        check_bitsandbytes(options)
        return
    if options.scheme is None:
        return
    flag = f"--scheme {options.scheme}"
    if options.method not in METHODS:
        if options.preset is not None:
            raise RequestError(
                f"{flag} with --preset {options.preset}: its --method {options.method} rounds to integers only. Use"
                " --preset balanced (recommended), or --method rtn, which reads no text."
            )
        raise RequestError(
            f"{flag} with --method {options.method}: that method rounds to integers only. Use --method"
            f" {', '.join(METHODS[:-1])} or {METHODS[-1]}; --preset balanced is recommended."
        )
    if options.scale_dtype == "float16":
        raise RequestError(
            f"--scale-dtype float16 with {flag}: scales this small lose their digits in it. Use bfloat16 or float32."
        )
    if options.activations == "nvfp4" and options.method == "rtn":
        raise RequestError(
            "--activations nvfp4 with --method rtn: their global scale comes from a text, which rtn does not read. Use"
            " --method gptq or awq."
        )
    if options.format != "compressed-tensors":
        raise RequestError(
            f"{flag} with --format {options.format}: its numbers are written as compressed-tensors. Leave --format out."
        )
    if options.allocates:
        raise RequestError(f"{options.target} chooses between integers; {flag} has one size. Leave one of them out.")
    if options.distil:
        remedy = "Leave it out" if options.preset is None else "Use --preset balanced, or --method tune"
        asked = "--distil" if options.preset is None else f"--preset {options.preset} (its --distil)"
        raise RequestError(f"{asked} with {flag}: scales would leave the numbers that the file holds. {remedy}.")
    if options.quantize_mtp:
        raise RequestError(f"--quantize-mtp with {flag}: not shown to load anywhere. Leave one of them out.")
