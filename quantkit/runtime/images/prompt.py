"""A prompt with images: token ids with the places of the images, and the tensors that the model reads there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.tokenizer import library_errors
from quantkit.errors import RequestError
from quantkit.runtime.generate.chat_template import chat_text
from quantkit.runtime.generate.prefill import Beside

MOST_IMAGES = 64


def prompt_with_images(
    processor: Any, given: str | Sequence[Mapping[str, Any]], images: Sequence[Any], where: Path
) -> tuple[list[int], dict[str, Tensor]]:
    """Return token ids, and what the processor gives beside them (``pixel_values`` and more), one row.

    Through the chat template where there is one; else the model's mark of an image stands before the text, once for
    each image, unless the text has it.

    processor: as ``load_processor`` returns it.
    given: text, or chat messages. Messages say the places of the images, in order: ``{"type": "image"}`` in a content.
    images: ``PIL.Image``, RGB.
    where: the model, as an error names it.

    Raises RequestError if places and images do not agree, or the processor refuses them; as ``chat_text`` does.
    """
    if len(images) > MOST_IMAGES:
        raise RequestError(f"{len(images)} images in one prompt; give {MOST_IMAGES} at most.")
    template = getattr(processor, "chat_template", None) or processor.tokenizer.chat_template
    if template:
        messages = _messages(given, len(images))
        marked = SimpleNamespace(chat_template=template, special_tokens_map=processor.tokenizer.special_tokens_map)
        text = chat_text(marked, messages)
    elif isinstance(given, str):
        text = _marked(processor, given, len(images))
    else:
        raise RequestError("this model has no chat template: give the prompt as text, not as messages.")
    with library_errors(where, "used with these images", "processor"):
        found = processor(text=[text], images=list(images), return_tensors="pt", add_special_tokens=not template)
    ids = found.pop("input_ids")[0].tolist()
    return ids, {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _messages(given: str | Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Return messages with a place for every image. Those for a text: one message, its images first."""
    if isinstance(given, str):
        places = [{"type": "image"} for _ in range(count)]
        return [{"role": "user", "content": [*places, {"type": "text", "text": given}]}]
    contents = [message.get("content") for message in given]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    named = sum(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)
    if named != count:
        raise RequestError(
            f"the messages have {named} places for images, {count} images are given. Put"
            ' {"type": "image"} into a message\'s content for each.'
        )
    return list(given)


def _marked(processor: Any, text: str, count: int) -> str:
    """Return a text that has the model's mark of an image once for each."""
    mark = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
    if not isinstance(mark, str) or not mark or text.count(mark) == count:
        return text  # a processor without a mark puts images in by itself
    return mark * count + text


def on_device(beside: Beside, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors where the model runs, those with a fraction in its dtype."""
    return {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in beside.items()
    }
