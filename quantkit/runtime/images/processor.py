"""A model's processor: images to what its vision tower reads, and their places among the tokens.

It is put together from the parts that images need. A class that also reads videos or sounds gets none for these, since
transformers builds them only where torchvision and others are installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.foreign_files.fields import read_json
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.tokenizer import library_errors
from quantkit.errors import RequestError, SourceError, UnsupportedModel

# transformers' names of the files that describe a processor.
PROCESSOR, IMAGES = "processor_config.json", "preprocessor_config.json"
MOST = 1 << 20  # bytes of one
# What numbers of these names may be, so that no file makes an image, or its tokens, larger than memory.
LARGEST = {
    "height": 1 << 13, "width": 1 << 13, "image_size": 1 << 13, "shortest_edge": 1 << 22, "longest_edge": 1 << 26,
    "min_pixels": 1 << 22, "max_pixels": 1 << 26, "max_image_tiles": 1 << 10, "max_patches": 1 << 16,
}  # fmt: skip
ANY_OTHER = 1 << 16  # tokens of an image, patches, factors


def load_processor(source: Source, tokenizer: Any) -> Any:
    """Return the processor of a model folder, a ``transformers.ProcessorMixin``.

    source: the model. tokenizer: as ``load_tokenizer`` returns it.

    Raises UnsupportedModel for a model without one, SourceError for damaged files, RequestError if a library
    is missing.
    """
    folder = source.path
    described = [folder / name for name in (PROCESSOR, IMAGES) if (folder / name).exists()]
    if folder.is_file() or not described:
        raise UnsupportedModel(
            f"{folder}: reads no images: it has neither {PROCESSOR} nor {IMAGES}. Give a folder of a model with vision,"
            " with its processor's files, or leave the images out."
        )
    settings = {path: read_json(path, MOST) for path in described}
    for path, values in settings.items():
        _check_numbers(values, path)
    name = _class_name(settings, folder, str(source.config.get("model_type")))
    try:
        with library_errors(folder, "loaded", "processor"):
            return _built(name, folder, tokenizer)
    except ImportError as error:
        raise RequestError(
            f"{folder}: its processor {name} needs a library that is not installed"
            f" ({' '.join(str(error).split())[:200]})."
        ) from error


def _built(name: str, folder: Path, tokenizer: Any) -> Any:
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import processor_class_from_name

    kind: Any = processor_class_from_name(name)
    # raises ImportError for a class that stands in for one whose libraries are missing
    attributes = kind.get_attributes()

    class ForImages(kind):  # type: ignore[misc]
        """The processor, with None for each part that it has for videos or sounds."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    parts: list[Any] = []
    for attribute in attributes:
        if attribute == "tokenizer":
            parts.append(tokenizer)
        elif attribute == "image_processor":
            parts.append(AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
        else:
            parts.append(None)
    stored, _ = kind.get_processor_dict(folder, local_files_only=True)
    ForImages.__name__ = kind.__name__
    return ForImages.from_args_and_dict(parts, stored)


def _class_name(settings: Mapping[Path, Mapping[str, Any]], folder: Path, kind: str) -> str:
    """Return the name of a processor's class: one that transformers has, never one of the folder's own code."""
    from transformers.models.auto import processing_auto

    known: Mapping[str, str] = processing_auto.PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
    tokenizer_config = folder / "tokenizer_config.json"
    files = {**settings, **({tokenizer_config: read_json(tokenizer_config)} if tokenizer_config.exists() else {})}
    for path, values in files.items():
        name = values.get("processor_class")
        if name is None:
            continue
        if name not in known.values():
            raise UnsupportedModel(
                f"{path}: processor_class is {str(name)[:60]!r}, which transformers does not have. Code of a model"
                " folder is not run; leave the images out, or update transformers."
            )
        return str(name)
    name = known.get(kind)
    if name is None:
        raise UnsupportedModel(
            f"{folder}: transformers has no processor for model_type {kind!r}. Leave the images out."
        )
    return str(name)


def _check_numbers(values: Any, path: Path) -> None:
    for name, number in _numbers(values, ""):
        last = name.rpartition(".")[2]
        if not 0 <= number <= LARGEST.get(last, ANY_OTHER):
            raise SourceError(
                f"{path}: {name} is {number}, expected at most {LARGEST.get(last, ANY_OTHER)}. The file is damaged:"
                " download it again."
            )


def _numbers(values: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield every whole number with its name, but ids of tokens."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _numbers(value, f"{name}.{key}".lstrip("."))
    elif isinstance(values, list):
        for value in values:
            yield from _numbers(value, name)
    elif isinstance(values, int) and not isinstance(values, bool) and not name.endswith(("_id", "_ids", "_index")):
        yield name, values
