"""Written tokenizers in a reader built on transformers 4, in an environment of its own (made here, through pip)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.tokenizer import load_tokenizer, write_tokenizer

pytestmark = [pytest.mark.interop, pytest.mark.real]

TEXT = "Hello world 1984\n\n1 a  b, naïve — 中文"
CHAT = [{"role": "user", "content": "hi"}]
READER = """
import json, sys, transformers
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
text, chat = json.loads(sys.argv[2])
print(json.dumps({
    "version": transformers.__version__,
    "ids": tokenizer(text)["input_ids"],
    "special": [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token],
    "chat": tokenizer.apply_chat_template(chat, tokenize=False) if tokenizer.chat_template else None,
}))
"""


@pytest.fixture(scope="module")
def python4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds transformers 4 and no torch."""
    folder = tmp_path_factory.mktemp("transformers4")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "transformers<5", "jinja2"]
    subprocess.run(install, check=True, capture_output=True)
    return python


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_transformers_4_reads_the_same_ids(
    model: str, python4: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = open_source(request.getfixturevalue(model))
    write_tokenizer(source, tmp_path)
    ours = load_tokenizer(source)
    command = [str(python4), "-c", READER, str(tmp_path), json.dumps([TEXT, CHAT])]
    theirs = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert theirs["version"].startswith("4.")
    assert theirs["ids"] == ours(TEXT)["input_ids"]
    assert theirs["special"] == [ours.bos_token, ours.eos_token, ours.pad_token]
    assert theirs["chat"] == (ours.apply_chat_template(CHAT, tokenize=False) if ours.chat_template else None)
