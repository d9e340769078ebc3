"""What is asked of a model, checked and made ready: options, token ids of prompts, images, room for the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.core.host import available_bytes, size_text
from quantkit.core.kvscheme import PAGE_TOKENS
from quantkit.errors import RequestError
from quantkit.runtime.generate.chat_template import chat_text
from quantkit.runtime.generate.prefill import Beside
from quantkit.runtime.generate.prompts import Messages, prompt_ids
from quantkit.runtime.generate.sampling import GenerationOptions, check_options
from quantkit.runtime.images.files import read_image
from quantkit.runtime.images.prompt import on_device, prompt_with_images

Images = Sequence[Any]  # of one prompt: paths of files, or ``PIL.Image``


@dataclass(frozen=True)
class Request:
    """One prompt, ready to be read.

    ids: its tokens. options: how to go on. beside: what the model reads beside the tokens: images.
    """

    ids: list[int]
    options: GenerationOptions
    beside: Beside


def requests(
    model: Any,
    prompts: Sequence[str | Messages],
    options: GenerationOptions | Sequence[GenerationOptions] | None,
    overrides: Mapping[str, Any],
    images: Sequence[Images],
) -> list[Request]:
    """Return one request for each prompt.

    model: a ``Model``. prompts: as ``as_batch`` returns them. options: one for all, or one each. overrides: fields of
    the options as keywords. images: those of each prompt; none at all: no prompt has any.

    Raises RequestError for a bad option, a prompt or an image that cannot be read, or too little memory for the cache.
    """
    if options is not None and overrides:
        raise RequestError("give either options or keywords, not both.")
    if not prompts:
        raise RequestError("no prompt was given.")
    try:
        shared = GenerationOptions(**overrides) if options is None else options
    except TypeError as error:
        raise RequestError(f"unknown generation option: {error}") from None
    each = list(shared) if isinstance(shared, Sequence) else [shared] * len(prompts)
    check_options(each, model.vocabulary)
    if len(each) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts but {len(each)} options; give one for all, or one each.")
    if images and len(images) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts but {len(images)} lists of images; give one list for each prompt.")
    seen = [[_image(one) for one in some] for some in images]  # a wrong file is told before anything is computed
    _ = model.fast_step, model.graph_decoder  # proved before any clock runs
    found = []
    for index, (text, one) in enumerate(zip(prompts, each, strict=True)):
        if seen and seen[index]:
            ids, beside = _encoded_with_images(model, text, seen[index])
            found.append(Request(ids, one, beside))
        else:
            found.append(Request(encoded(model, text, one.chat), one, {}))
    _check_room(model, [len(request.ids) + request.options.max_tokens for request in found])
    return found


def encoded(model: Any, given: str | Messages, chat: bool) -> list[int]:
    """Return token ids of a checked prompt; messages, and text with ``chat``, through the chat template."""
    if isinstance(given, str) and not chat:
        ids = prompt_ids(model.tokenizer, given, special=True, context=model.context)
    else:
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        text = chat_text(model.tokenizer, messages)
        ids = prompt_ids(model.tokenizer, text, special=False, context=model.context)
    return _checked(model, ids)


def _encoded_with_images(model: Any, given: str | Messages, images: Images) -> tuple[list[int], Beside]:
    ids, beside = prompt_with_images(model.processor, given, images, model.path)
    return _checked(model, ids), on_device(beside, model.device, model.dtype)


def _image(given: Any) -> Any:
    if isinstance(given, (str, Path)):
        return read_image(given)
    if hasattr(given, "convert") and hasattr(given, "size"):
        return given.convert("RGB")
    raise RequestError(f"an image is {type(given).__name__}; give the path of a file, or a PIL.Image.")


def _checked(model: Any, ids: Sequence[int]) -> list[int]:
    from quantkit.checkpoint.tokenizer import check_vocabulary

    check_vocabulary(ids, model.config, "prompt")
    return list(ids)


def _check_room(model: Any, lengths: Sequence[int]) -> None:
    """Check that the KV cache of sequences of these lengths fits the free memory of a CPU.

    Raises RequestError if not.
    """
    if model.device.type != "cpu" or (model.context is not None and max(lengths) > model.context):
        return  # what is longer than the context is refused with other words
    needed = model.cache_bytes(lengths, PAGE_TOKENS)
    if needed > available_bytes():
        raise RequestError(
            f"max_tokens: the KV cache of {sum(lengths)} tokens, prompts and answers, needs"
            f" {size_text(int(needed))}, and {size_text(available_bytes())} are free. Use a smaller max_tokens,"
            " fewer prompts, or --kv-bits."
        )
