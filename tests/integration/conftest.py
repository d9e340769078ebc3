"""A tiny random model with a real tokenizer, as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SENTENCES = [
    f"The {a} {b} {c} near the {d}, and nobody {c} twice."
    for a in ("old", "small", "grey", "quick")
    for b in ("fox", "river", "engine", "window")
    for c in ("runs", "waits", "sings")
    for d in ("gate", "wall", "sea")
]
TINY = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=1,
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do not modify; see ``tiny_model``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny") / "model"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=len(fast), tie_word_embeddings=True, **TINY)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_model(tiny_original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_original, tmp_path / "source"))


@pytest.fixture(scope="session")
def calibration_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(" ".join(SENTENCES * 4))
    return path


@pytest.fixture
def quantkit() -> Callable[..., Any]:
    """Run the command line as a user does, through ``main``: exit code, stdout, stderr."""
    import subprocess
    import sys

    def run(*arguments: object, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "quantkit.cli.main", *map(str, arguments)],
            check=False, text=True, capture_output=True, timeout=300, **kwargs,
        )  # fmt: skip

    return run


@pytest.fixture
def states_after_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job keeps the states in front of every block, however little time it has worked since the last."""
    from quantkit.convert.job import states

    monkeypatch.setattr(states, "EVERY", 0.0)
    monkeypatch.setattr(states, "SHARE", 0)


@pytest.fixture
def precisions_seen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], set[str]]:
    """``watch(module, function)`` -> the precisions in which oneDNN multiplied float32 matrices.

    Those are the ones in force whenever that function was called.
    """
    mkldnn: Any = torch.backends.mkldnn  # torch's types do not know its parts

    def watch(module: Any, name: str) -> set[str]:
        function, seen = getattr(module, name), set()

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.add(mkldnn.matmul.fp32_precision)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)
        return seen

    return watch
