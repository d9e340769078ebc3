"""Image files, read within bounds."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

from quantkit.checkpoint.regular import given_path, read_regular
from quantkit.errors import MissingExtra, RequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_BYTES = 100_000_000
MOST_PIXELS = 64_000_000  # 192 MB as bytes; the largest cameras make as many


def read_image(file: str | Path) -> Any:
    """Return a file as a ``PIL.Image`` in RGB, turned as its camera says (as ``transformers.image_utils.load_image``).

    Raises MissingExtra without pillow, RequestError for what is no image, or larger than any model looks at.
    """
    if importlib.util.find_spec("PIL") is None:
        raise MissingExtra("pillow", "images", "Reading an image")
    from PIL import Image, ImageOps

    path = given_path(file)
    try:
        data = read_regular(path, MOST_BYTES)
    except FileNotFoundError:
        raise RequestError(f"{path}: no such image. Give a file ({', '.join(FORMATS)}).") from None
    except OSError as error:
        raise RequestError(
            f"{path}: cannot be read ({error.strerror}). Check what it is and who may read it."
        ) from error
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise RequestError(
                    f"{path}: {image.width} x {image.height} pixels, more than {MOST_PIXELS:,}. Give a smaller image."
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    # what its readers of damaged files raise
    except (OSError, ValueError, SyntaxError, EOFError, LookupError, ArithmeticError, Image.DecompressionBombError,
            Image.DecompressionBombWarning) as error:  # fmt: skip
        raise RequestError(
            f"{path}: cannot be read as an image ({type(error).__name__}: {str(error)[:200]})."
            f" Give a whole file of {', '.join(FORMATS)}."
        ) from error
