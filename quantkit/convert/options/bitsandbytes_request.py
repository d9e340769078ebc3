"""Options of ``--format bitsandbytes``: the library rounds, so that most others have nothing to decide."""

from __future__ import annotations

from typing import Any

from quantkit.core.scheme import OF_BITSANDBYTES
from quantkit.errors import RequestError
from quantkit.formats.bitsandbytes_library import require_library

FORMAT = "bitsandbytes"


def check_bitsandbytes(options: Any) -> None:
    """Check the options that belong to ``--format bitsandbytes``, and that nothing contradicts it.

    options: ``ConvertOptions``.

    Raises RequestError for the first that does, MissingExtra without the library.
    """
    ours, scheme = ", ".join(OF_BITSANDBYTES), options.scheme
    if options.format != FORMAT:
        raise RequestError(
            f"--scheme {scheme} with --format {options.format}: bitsandbytes files hold these numbers. Add --format"
            f" {FORMAT}."
        )
    if scheme is None:
        raise RequestError(f"--format {FORMAT}: which scheme? Add --scheme nf4, or one of: {ours}.")
    if scheme not in OF_BITSANDBYTES:
        raise RequestError(
            f"--format {FORMAT} with --scheme {scheme}: its schemes are {ours}. Choose one, or leave --format out."
        )
    wrong = {
        f"--preset {options.preset}: the library rounds, there is no search": options.preset is not None,
        f"--method {options.method}: the library rounds, that is --method rtn": options.method != "rtn",
        "--kv-bits, --kv-budget: transformers, which reads it, has a cache of its own (native holds one)": (
            options.cache.wanted
        ),
        "--target-bpw, --target-size: one scheme has one size": options.allocates,
        "--distil: learns scales of integer schemes": bool(options.distil),
        "--quantize-mtp: not shown to load anywhere": options.quantize_mtp,
        "--scales minmax: the library takes the largest value of a block": options.scales != "search",
    }
    for reason, given in wrong.items():
        if given:
            raise RequestError(f"--format {FORMAT} with {reason}. Leave it out.")
    require_library()
