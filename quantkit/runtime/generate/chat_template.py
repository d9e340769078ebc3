"""Chat messages to the text that a model was trained on, by its chat template.

A template is a program that comes with the model: it is rendered in a child process, with limits on time, memory and
text. The text is that of ``tokenizer.apply_chat_template``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.core.limited.child import LimitedChild, Stopped
from quantkit.errors import RequestError, SourceError

TASK = Path(__file__).with_name("chat_template_task.py")
MEMORY = 256 << 20
SECONDS = 3  # of processor time; a conversation of a thousand messages takes hundredths
MOST_CHARACTERS = 16_000_000  # of text, beyond any context
MOST_TEMPLATE = 1_000_000  # characters; the longest known has 20,000
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; the first is what templates read
WORDS = 300  # characters of a template's own message that are shown


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Render messages, and the beginning of an answer, with a tokenizer's chat template.

    tokenizer: with ``chat_template`` (text, or several by name, of which ``default`` is taken, or ``tool_use`` where
        tools are given) and ``special_tokens_map``.
    messages: of JSON values.
    variables: what else the template may use: ``tools``, ``documents``, ``add_generation_prompt`` (True unless given),
        and its own names.

    Raises RequestError if there is no template or it refuses the messages, SourceError if it is damaged or goes over
    a limit.
    """
    template = _template(tokenizer.chat_template, bool(variables.get("tools")))
    given = {"tools": None, "documents": None, "add_generation_prompt": True, **tokenizer.special_tokens_map}
    given |= variables | {"messages": [_message(message) for message in messages]}
    try:
        reply = _child().ask({"template": template, "variables": given, "most": MOST_CHARACTERS})
    except Stopped as error:
        raise SourceError(f"The model's chat template {error}. {_REMEDY}") from error
    if "refused" in reply:
        raise RequestError(f"The model's chat template refuses these messages: {reply['refused'][:WORDS]}")
    if "error" in reply:
        raise SourceError(f"The model's chat template fails with these messages ({reply['error'][:WORDS]}). {_REMEDY}")
    if "text" not in reply:
        raise SourceError(f"The model's chat template writes more than {MOST_CHARACTERS:,} characters. {_REMEDY}")
    text: str = reply["text"]
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise SourceError(f"The model's chat template writes half of a surrogate pair, no text. {_REMEDY}")
    return text


_REMEDY = "Repair chat_template (in tokenizer_config.json, chat_template.jinja or the GGUF file), or give plain text."


def _template(stored: Any, tools: bool) -> str:
    if isinstance(stored, Mapping):
        name = "tool_use" if tools and "tool_use" in stored else "default"
        if name not in stored:
            names = ", ".join(sorted(map(str, stored)))[:WORDS]
            raise SourceError(f"The model has chat templates ({names}), but none is called 'default'. {_REMEDY}")
        stored = stored[name]
    if not stored:
        raise RequestError(
            "this model has no chat template: it is no chat model. Give the prompt as plain text, without --chat."
        )
    if not isinstance(stored, str) or len(stored) > MOST_TEMPLATE:
        what = f"longer than {MOST_TEMPLATE:,} characters" if isinstance(stored, str) else "no text"
        raise SourceError(f"The model's chat template is {what}. {_REMEDY}")
    return stored


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates expect it: no fields that are None, reasoning under the names that are read."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


@functools.cache
def _child() -> LimitedChild:
    """Return the one child of this process; it starts with the first template."""
    return LimitedChild(
        TASK, ("jinja2", "markupsafe"), memory=MEMORY, seconds=SECONDS, reply_bytes=6 * MOST_CHARACTERS + 1000
    )
