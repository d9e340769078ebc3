"""Nothing of a model folder is executed, whatever its files name, by any entry point, with a user who agrees to all."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.foreign_files.code_references import NOT_PASSED_ON, without_code

PACKAGE = Path(__file__).resolve().parents[2] / "quantkit"
PLANTED = Path(__file__).with_name("planted.py")
MODULES = (
    "m",
    "configuration_m",
    "tokenization_m",
    "processing_m",
    "generation_utils",
    "__init__",
    "conftest",
    "setup",
)
AUTO = (
    "AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText",
    "AutoImageProcessor", "AutoProcessor", "AutoFeatureExtractor",
)  # fmt: skip
AUTO_MAP = {**dict.fromkeys(AUTO, "m.E"), "AutoTokenizer": ["tokenization_m.E", "tokenization_m.E"]}
# names that a config may give to how a model runs, each a kernel of a stranger's on the hub
KERNELS = dict.fromkeys(
    ("_attn_implementation", "attn_implementation", "_attn_implementation_internal", "experts_implementation",
     "_experts_implementation", "disguised"),
    "someuser/kernel",
)  # fmt: skip
RUNNING = ("eval", "exec", "compile", "__import__", "torch.load", "np.load", "numpy.load", "runpy.run_path")
UNPICKLING = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "runpy"}
RENAMED = {"attribute_map": {"disguised": "_attn_implementation"}}


class Bomb:
    """Appends to the file of marks when it is unpickled."""

    def __init__(self, marks: Path) -> None:
        self.marks = marks

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"with open({str(self.marks)!r}, 'a') as f:\n    f.write('pickle ')",)


def plant(folder: Path, marks: Path) -> None:
    """Put code into every kind of file that some library would run."""
    (folder / "custom_generate").mkdir()
    for name in [*MODULES, "custom_generate/generate"]:
        source = (
            f"with open({str(marks)!r}, 'a') as f:\n    f.write('{name} ')\n"
            "class E:\n    pass\ndef generate(*a, **k):\n    pass\n"
        )
        (folder / f"{name}.py").write_text(source)
    for name in ("pytorch_model.bin", "model.pt", "model.pkl", "optimizer.pt", "training_args.bin", "vocab.pkl"):
        (folder / name).write_bytes(pickle.dumps(Bomb(marks)))
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps({"auto_map": AUTO_MAP, "processor_class": "E"}))
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(folder), "peft_type": "LORA", "auto_mapping": AUTO_MAP})
    )
    edit(folder / "generation_config.json", custom_generate=str(folder), trust_remote_code=True)
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(evil)
    edit(folder / "tokenizer_config.json", auto_map=AUTO_MAP, name_or_path=str(folder), chat_template=None)


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes one away."""
    data = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def llama(folder: Path) -> dict[str, Any]:
    """The model that the folder holds, with kernels."""
    return {**KERNELS, **RENAMED, "use_kernels": True, "trust_remote_code": True}


def vit(folder: Path) -> dict[str, Any]:
    """A type of transformers' that is no causal language model: its AutoModelForCausalLM would be the folder's."""
    return {"model_type": "vit"}


def relative(folder: Path) -> dict[str, Any]:
    """The same by a path that depends on where the command runs."""
    return {"model_type": "t5", "_name_or_path": "."}


def nested(folder: Path) -> dict[str, Any]:
    """Configs inside a config, of which transformers builds models of its own accord, without a word on trust."""
    inner = {
        "model_type": "depth_anything",
        "pad_token_id": 0,
        "hidden_size": 4,
        "vocab_size": 8,
        "auto_map": AUTO_MAP,
        "_name_or_path": str(folder),
        **KERNELS,
        **RENAMED,
    }
    return {"model_type": "fuyu", "text_config": {**inner, "text_config": inner}}


def unknown(folder: Path) -> dict[str, Any]:
    """A type that only the folder knows, quantized in a way that only the folder knows."""
    return {"model_type": "mine", "quantization_config": {"quant_method": "mine", "auto_map": AUTO_MAP}}


def runs(folder: Path, out: Path, marks: Path, text: Path) -> dict[str, Any]:
    out.mkdir()
    done = subprocess.run(
        [sys.executable, PLANTED, folder, out, marks, text], check=False, text=True, capture_output=True, timeout=300,
        input="y\n" * 100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("change", [llama, vit, relative, nested, unknown])
def test_no_file_of_a_folder_is_executed(
    change: Callable[[Path], dict[str, Any]],
    tiny_model: Path,
    calibration_text: Path,
    tmp_path: Path,
) -> None:
    marks = tmp_path / "marks"
    plant(tiny_model, marks)
    edit(
        tiny_model / "config.json",
        auto_map=AUTO_MAP,
        _name_or_path=str(tiny_model),
        custom_pipelines={"x": {"impl": "m.E"}},
    )
    edit(tiny_model / "config.json", **change(tiny_model))
    for name in ("generation_config.json", "preprocessor_config.json", "processor_config.json", "more.json"):
        (tiny_model / name).write_text(json.dumps({"auto_map": AUTO_MAP, "custom_generate": "someuser/repo"}))
    found = runs(tiny_model, tmp_path / "out", marks, calibration_text)
    assert found["marks"] == []
    assert found["seen"] == [], found
    own = ("generate --chat", "generate --image", "tokenizer")  # a template that breaks out, a processor of its own
    assert found["ends"]["generate --image"].startswith("exit 1: Error"), found["ends"]
    works = {name: end for name, end in found["ends"].items() if name not in own}
    if change is llama:  # the folder's own code is not needed, and everything else is done
        assert {name: end for name, end in works.items() if end.startswith(("exit 1", "exit 2"))} == {}
        assert passes_on_no_code(tmp_path / "out" / "a")
    else:
        assert {name: end for name, end in works.items() if not end.startswith(("exit 1: Error", "exit 2: Error"))} == {
            "load": works["load"]
        }
        assert works["load"].startswith(("UnsupportedModel", "CheckpointError"))


def passes_on_no_code(folder: Path) -> bool:
    """Whether a converted folder holds none of the planted files, and its JSON names no code and no kernel."""
    names = {path.name for path in folder.rglob("*") if path.suffix in (".py", ".bin", ".pt", ".pkl")}
    read = "".join(path.read_text() for path in folder.rglob("*.json") if path.name != "tokenizer.json")
    return not names and not [key for key in NOT_PASSED_ON if f'"{key}"' in read]


def test_planted_code_would_have_been_seen(
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """The plants work: each runs where somebody asks for it."""
    marks = tmp_path / "marks"
    plant(tiny_model, marks)
    subprocess.run([sys.executable, tiny_model / "m.py"], check=True)
    pickle.loads((tiny_model / "pytorch_model.bin").read_bytes())
    assert marks.read_text().split() == ["m", "pickle"]


def test_references_are_dropped_at_every_depth() -> None:
    clean = {"model_type": "llama", "sub": {"deep": [{"hidden_size": 4}]}}
    dirty = {"auto_map": 1, "sub": {"_name_or_path": "x", "deep": [{"hidden_size": 4, **KERNELS, **RENAMED}]}}
    assert without_code({"model_type": "llama", **dirty}) == {
        **clean,
        "sub": {"deep": [{"hidden_size": 4, "disguised": "someuser/kernel"}]},
    }


def calls(names: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def test_every_call_that_could_run_a_folders_code_says_no() -> None:
    found = list(calls(("from_config", "from_pretrained", "get_class_from_dynamic_module")))
    assert any(where.startswith("model/skeleton.py") for where, _ in found)
    silent = [
        where
        for where, call in found
        if not any(
            option.arg == "trust_remote_code" and isinstance(option.value, ast.Constant) and option.value.value is False
            for option in call.keywords
        )
    ]
    assert silent == []


def test_nothing_in_the_package_unpickles_or_evaluates() -> None:
    named = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Call) and ast.unparse(node.func) in RUNNING)
        or (isinstance(node, ast.Import) and {alias.name for alias in node.names} & UNPICKLING)
    }
    # A few functions of a wheel whose hash is checked, to make a text; and what a child of ours sends back through its
    # pipe. A model folder has no part in either.
    assert named == {"checkpoint/text_files/wikipedia.py", "core/limited/worker.py"}
