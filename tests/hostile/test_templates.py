"""A chat template is a stranger's program: it ends by name within 10 seconds and 1 GB.

A good one gives transformers' text.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hostile.limits import Limited

from quantkit.errors import RequestError, SourceError
from quantkit.runtime.generate import chat_template
from quantkit.runtime.generate.chat_template import chat_text

HERE = "hostile.test_templates:render"
MESSAGES = [{"role": "user", "content": "Hi"}]


def render(template: Any, messages: Any = MESSAGES) -> str:
    """What the child with limits calls."""
    return chat_text(SimpleNamespace(chat_template=template, special_tokens_map={}), messages)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'a' * 10**10 }}", "needs more than 268 MB of memory"),
        ("{% set n = namespace(a='aa') %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}", "memory"),
        ("{{ '%999999999999d' % 5 }}", "memory"),
        ("{{ '{:>999999999}'.format(1) }}", "memory"),
        ("{{ messages|tojson(indent=10**9) }}", "memory"),
        ("{% for i in range(9**5) %}{% for i in range(9**5) %}{% endfor %}{% endfor %}", "more than 3 seconds"),
        ("{{ 7 ** (7 ** 9) }}", "more than 3 seconds"),
        ("{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "writes more than 16,000,000 characters"),
        ("{{ range(10**10)|list }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply, or calls itself without end"),
        ("{{ " + "(" * 100_000 + " }}", "nested too deeply"),
        ("{{ " + "-" * 100_000 + "1 }}", "nested too deeply"),
        ("{% if 1 %}" * 1000 + "{% endif %}" * 1000, ""),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "nested too deeply"),
        ("{{ messages.nothing() }}", "UndefinedError"),
        ("{{ messages[0].content.nothing() }}", "UndefinedError"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{", "line 1: unexpected 'end of template'"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "SecurityError"),
        ("{{ namespace(_x=1) }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ '\\ud800' }}", "half of a surrogate pair"),
        ("x" * 1_000_001, "longer than 1,000,000 characters"),
        (5, "no text"),
        ({"rag": "x"}, "none is called 'default'"),
        ({"default": ["x"]}, "no text"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_hostile_template_is_refused_by_name(template: Any, words: str, limited: Limited) -> None:
    outcome = limited(HERE, template)
    outcome.refused("chat template", words)
    assert outcome.error == "SourceError"
    assert len(outcome.message) < 700


def test_the_words_of_a_template_are_told() -> None:
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="no chat template: it is no chat model"):
        render(None)


def test_one_child_renders_all_and_a_new_one_follows_one_that_was_ended() -> None:
    child = chat_template._child()
    assert render("a") == "a"
    process = child._process
    assert process is not None
    start = time.monotonic()
    for number in range(200):
        assert render("{{ messages[0].content }}", [{"content": str(number)}]) == str(number)
    assert time.monotonic() - start < 20  # 200 processes would take longer
    assert child._process is process
    with pytest.raises(SourceError, match="more than 3 seconds"):
        render("{% for i in range(9**5) %}{% for i in range(9**5) %}{% endfor %}{% endfor %}")
    assert render("b") == "b"
    assert child._process is not process
    child.close()
    assert render("c") == "c"
    child.close()


def test_a_template_finds_neither_this_process_nor_its_files(tmp_path: Path) -> None:
    """The child has its own interpreter.

    That is one without the site, the variables and the folder that would load code into it.
    """
    (tmp_path / "jinja2.py").write_text("raise SystemExit('planted code ran')")
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        chat_template._child().close()
        assert render("{{ messages|length }}") == "1"
    finally:
        os.chdir(here)
        chat_template._child().close()


CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'\
+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- message.tool_calls[0].function.arguments | tojson }}
    {%- endif %}
{%- endfor %}"""
FEATURES = """
{%- set ns = namespace(last=0, found=false) -%}
{%- for message in messages[::-1] %}
    {%- if loop.first %}{% continue %}{% endif %}
    {%- if message.role == "tool" %}{% break %}{% endif %}
    {%- set ns.last = loop.index0 %}
{% endfor %}
{{ ns.last }} {{ ns.found }} {{ dict(a=1, **{'b': [1, 2]}) }} {{ dict.fromkeys(['x'], 2) }}
{% generation %}
    kept {{ messages[0].content | tojson }} {{ messages[0] | tojson(ensure_ascii=True, sort_keys=True) }}
{% endgeneration %}
{%- macro render(item, depth=0) %}{{ ' ' * depth }}{{ item }}{% endmacro %}
{{ render('é', 3) }}{% if documents %}{% for d in documents %}{{ d.title }}: {{ d['text'] }}{% endfor %}{% endif %}
{% for message in messages %}{% if message.content is string %}{{ message.content.split('n')[-1].strip() }}
{%- else %}{% for part in message.content %}{{ part.type ~ part.text }}{% endfor %}{% endif %}
    {{ message.reasoning_content | default('none') }} {{ message.thinking }} {{ message.name }}
{% endfor %}
{{ messages | map(attribute='role') | join(', ') }} \
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ eos_token }} {{ '%s-%d' % ('a', 3) }} {{ "{}".format(1.5) }} {{ [1, true, none, 2.5e-7] }} \
{{ messages[0].items() | list }}
"""
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief — é 😀 <b>&'\"\n\ttab"},
    {"role": "user", "content": "A question?", "name": None},
    {"role": "assistant", "content": "An answer.", "reasoning": "thought", "tool_calls": None},
    {"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "text", "text": "two"}]},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object", "x": [1]}}}
]


def oracle(template: Any) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>", additional_special_tokens=["<x>"]
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [CHATML, LLAMA, FEATURES, {"default": CHATML, "tool_use": LLAMA}])
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"documents": [{"title": "T", "text": "é"}], "extra": 1}])
def test_the_text_is_that_of_transformers(template: Any, more: dict[str, Any]) -> None:
    tokenizer = oracle(template)
    messages = CONVERSATION if template == FEATURES else CONVERSATION[:3]
    for prompt in (True, False):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False, **more)
        assert chat_text(tokenizer, messages, add_generation_prompt=prompt, **more) == expected


def test_what_transformers_refuses_is_refused() -> None:
    for template in (
        "{{ ''.__class__.__mro__ }}",
        "{% set n = namespace(_a=1) %}",
        "{{ raise_exception('x') }}",
        "{{ x.y }}",
    ):
        with pytest.raises(Exception):  # noqa: B017
            oracle(template).apply_chat_template(MESSAGES, tokenize=False)
        with pytest.raises((RequestError, SourceError)):
            chat_text(oracle(template), MESSAGES)


@pytest.mark.real
def test_the_template_of_a_real_model_gives_the_text_of_transformers(smollm2: Path) -> None:
    from quantkit.checkpoint.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2)
    for messages in (MESSAGES, CONVERSATION[:3]):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert chat_text(tokenizer, messages) == expected
    json.dumps(tokenizer.special_tokens_map)
