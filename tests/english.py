"""A tiny model whose tokenizer has merges for English: a GGUF file's is tried before it is taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from quantkit.checkpoint.tokenizer import ENGLISH


def with_tokenizer_of_english(model: Path, folder: Path) -> Path:
    """Copy a model folder, its tokenizer trained anew; return the copy."""
    from tokenizers import Tokenizer, pre_tokenizers, trainers

    shutil.copytree(model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    trainer = trainers.BpeTrainer(
        vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"],
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([ENGLISH] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
