"""Imports point one way (read from the code), and ``import quantkit`` is light (seen in a fresh process)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "quantkit"

# Which rooms each room may import, besides itself, quantkit.errors and quantkit.version.
ALLOWED = {
    "errors": set(),
    "version": set(),
    "core": set(),
    "checkpoint": {"core"},
    "algorithms": {"core"},
    "formats": {"core"},
    "model": {"core", "checkpoint"},
    "calibrate": {"core", "checkpoint", "model"},
    "runtime": {"core", "checkpoint", "model", "formats"},
    "evaluate": {"core", "checkpoint", "formats", "model", "runtime"},
    "hf": {"core", "checkpoint", "model", "formats", "runtime"},
    "convert": {"core", "checkpoint", "model", "calibrate", "algorithms", "formats", "runtime", "hf"},
    "cli": {
        "core",
        "checkpoint",
        "model",
        "calibrate",
        "algorithms",
        "formats",
        "runtime",
        "hf",
        "convert",
        "evaluate",
    },
    "__main__": {"cli"},
}
LIGHT = {"click", "torch", "numpy", "rich", "safetensors", "huggingface_hub"}
TRANSFORMERS_ROOMS = ("model/", "runtime/", "checkpoint/tokenizer.py", "hf.py")
OPTIONAL = {
    "bitsandbytes",
    "gguf",
    "compressed_tensors",
    "datasets",
    "accelerate",
    "matplotlib",
    "starlette",
    "uvicorn",
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> list[tuple[str, int, bool]]:
    """(dotted module, line, at module level and not for type checkers alone) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside_function: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside_function |= {id(child) for child in ast.walk(node)}
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            inside_function |= {id(child) for statement in node.body for child in ast.walk(statement)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, id(node) not in inside_function) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; this project imports by full name"
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "quantkit"
                else [node.module or ""]
            )
            found += [(name, node.lineno, id(node) not in inside_function) for name in names]
    return found


def room(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_room_is_known():
    rooms = {room(path) for path in files()} - {"__init__"}
    assert rooms <= set(ALLOWED), f"new rooms need a line in ALLOWED: {rooms - set(ALLOWED)}"


def test_rooms_import_one_way():
    wrong = []
    for path in files():
        if path == PACKAGE / "__init__.py":
            continue  # public names, loaded lazily
        for module, line, _ in imports(path):
            if module.startswith("quantkit."):
                target = module.split(".")[1]
                known = target in ALLOWED
                if known and target not in ALLOWED[room(path)] | {room(path), "errors", "version"}:
                    wrong.append(f"{where(path, line)}: {room(path)} must not import {module}")
    assert not wrong, "\n".join(wrong)


def test_transformers_is_imported_in_few_places_and_inside_functions():
    wrong = []
    for path in files():
        relative = path.relative_to(PACKAGE).as_posix()
        for module, line, at_import in imports(path):
            if module.split(".")[0] == "transformers":
                if not relative.startswith(TRANSFORMERS_ROOMS):
                    wrong.append(f"{where(path, line)}: transformers belongs to {TRANSFORMERS_ROOMS}")
                if at_import and relative != "hf.py":
                    wrong.append(f"{where(path, line)}: import transformers inside the function that needs it")
    assert not wrong, "\n".join(wrong)


def test_triton_is_imported_only_in_its_kernels():
    wrong = [
        where(path, line)
        for path in files()
        for module, line, _ in imports(path)
        if module.split(".")[0] == "triton"
        and not path.relative_to(PACKAGE).as_posix().startswith("runtime/kernels/triton/")
    ]
    assert not wrong, wrong


def test_numba_is_imported_only_in_its_kernels_and_those_only_when_used():
    """Its decorators stand at module level, so those modules are imported by name inside functions.

    See kernels/numba/threads.py.
    """
    kernels = "runtime/kernels/numba/"
    wrong = []
    for path in files():
        inside = path.relative_to(PACKAGE).as_posix().startswith(kernels)
        for module, line, _ in imports(path):
            if module.split(".")[0] in ("numba", "llvmlite") and not inside:
                wrong.append(f"{where(path, line)}: {module} belongs to {kernels}")
            kernel = module.startswith("quantkit.runtime.kernels.numba.") and not module.endswith(".threads")
            if kernel and not inside:
                wrong.append(f"{where(path, line)}: {module} is optional; use threads.compiled()")
    assert not wrong, "\n".join(wrong)


def test_optional_libraries_are_imported_in_one_file_each_and_inside_functions():
    homes: dict[str, set[str]] = {}
    wrong = []
    for path in files():
        for module, line, at_import in imports(path):
            library = module.split(".")[0]
            if library in OPTIONAL:
                homes.setdefault(library, set()).add(path.relative_to(PACKAGE).as_posix())
                if at_import:
                    wrong.append(f"{where(path, line)}: {library} is optional; import it inside the function")
    wrong += [
        f"{library} is imported in several files: {sorted(places)}"
        for library, places in homes.items()
        if len(places) > 1
    ]
    assert not wrong, "\n".join(wrong)


def test_core_needs_torch_alone():
    allowed = {"torch", "quantkit", "__future__"} | set(sys.stdlib_module_names)
    wrong = [
        f"{where(path, line)}: {module}"
        for path in (PACKAGE / "core").rglob("*.py")
        for module, line, _ in imports(path)
        if module.split(".")[0] not in allowed
    ]
    assert not wrong, wrong


def test_the_rules_of_this_test_catch_what_they_forbid(tmp_path):
    """A guard that cannot fail is none: a core file that imports transformers and formats is seen."""
    bad = tmp_path / "bad.py"
    bad.write_text("import transformers\nfrom quantkit import formats\ndef f():\n    import triton.language\n")
    assert imports(bad) == [("transformers", 1, True), ("quantkit.formats", 2, True), ("triton.language", 4, False)]


SPY = """
import sys
events = []
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        mode = arguments[1] or "r"
        if any(letter in mode for letter in "wax+"):
            events.append(f"writes {arguments[0]}")
        elif not arguments[0].endswith((".py", ".pyc")) and "/lib/python" not in arguments[0]:
            events.append(f"reads {arguments[0]}")
    elif event.startswith(("socket.", "subprocess.", "os.exec", "os.posix_spawn", "urllib.")):
        events.append(event)
sys.dont_write_bytecode = True
import encodings, importlib.metadata, pathlib, types, typing  # the interpreter's own reading is not quantkit's
sys.addaudithook(hook)
import quantkit
loaded = [name for name in ("torch", "transformers", "triton", "datasets", "numpy", "click") if name in sys.modules]
print("|".join(events), "|".join(loaded), sep="\\n")
"""


def test_importing_quantkit_touches_no_gpu_file_or_network_and_loads_no_library():
    """No torch in sys.modules means that no GPU can have been touched."""
    done = subprocess.run([sys.executable, "-c", SPY], capture_output=True, text=True, check=True, cwd=ROOT)
    events, loaded = done.stdout.split("\n")[:2]
    assert events == ""
    assert loaded == ""


@pytest.mark.parametrize("name", ["Scheme", "QuantTensor", "load", "evaluate", "convert"])
def test_public_names_load_neither_transformers_nor_triton(name):
    code = (
        f"import sys, quantkit; quantkit.{name}; import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "print([m for m in ('transformers', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
