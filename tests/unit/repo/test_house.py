"""The house: no circles of imports, none that runs back up, folders and functions that one can take in at a glance.

Every import counts, those inside functions and under TYPE_CHECKING too. The rules between the big rooms are in
test_imports.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "quantkit"

# From low to high: a room imports from the rooms before it. A module that lies directly in the folder is a room.
ORDER = {
    "convert": [
        "progress", "results", "gguf", "options", "plan", "engines", "output",
        "job", "stages", "report", "repack", "finish", "run", "imatrix", "api",
    ],
    "runtime": [
        "kernels", "kv_cache", "layers", "decode", "generate", "images", "requests", "model", "load", "path_words",
    ],
}  # fmt: skip
ROOMS = 15  # that a folder shows at most
LINES = 50  # of a function
LONG = 10  # functions that may have more
# Those, and why: another one needs a reason here.
LONG_FUNCTIONS = {
    "runtime/kernels/triton/attention.py attention_kernel": "a kernel is one function",
    "runtime/kernels/triton/gemm.py gemm_kernel": "a kernel is one function",
    "runtime/kernels/triton/gemv.py gemv_kernel": "a kernel is one function",
    "runtime/kernels/triton/packed_attention.py packed_part": "a kernel is one function",
    "convert/options/options.py ConvertOptions.__post_init__": (
        "one check after another, in the order of their messages"
    ),
    "convert/plan/memory_inputs.py count_sizes": "one line a number",
}
PARAMETERS = 8  # of a public function, that are not keyword-only
WIDTH = 120  # of a line, in these folders
FOLDERS = ("quantkit", "tests", "eval", "examples")


def modules(root: Path) -> dict[str, ast.Module]:
    """Every module of the package in ``root / "quantkit"``, by its dotted name."""
    found = {}
    for path in sorted((root / "quantkit").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def graph(trees: dict[str, ast.Module]) -> dict[str, dict[str, int]]:
    """The modules of the package that each module imports, with the line."""
    arrows: dict[str, dict[str, int]] = {name: {} for name in trees}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [module if module in trees else str(node.module) for module in inner]
            else:
                continue
            arrows[name].update({target: node.lineno for target in targets if target in trees})
    return arrows


def circles(arrows: dict[str, dict[str, int]]) -> list[list[str]]:
    """The strongly connected components of more than one module, and modules that import themselves (Tarjan, 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for target in arrows[module]:
            if target not in number:
                visit(target)
            if target in stack:
                low[module] = min(low[module], low[target])
        if low[module] == number[module]:
            component = stack[stack.index(module) :]
            del stack[-len(component) :]
            if len(component) > 1 or module in arrows[module]:
                found.append(sorted(component))

    for module in arrows:
        if module not in number:
            visit(module)
    return sorted(found)


def back_up(folder: str, order: list[str], arrows: dict[str, dict[str, int]]) -> list[str]:
    """Imports inside a folder that run from a lower room to a higher one."""
    prefix = f"quantkit.{folder}."

    def height(module: str) -> int:
        return order.index(module.removeprefix(prefix).split(".")[0])

    return [
        f"{source}:{line} imports {target}"
        for source, targets in arrows.items()
        for target, line in targets.items()
        if source.startswith(prefix) and target.startswith(prefix) and height(source) < height(target)
    ]


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        name = inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{inside}.{node.name}".lstrip(".")
            if not isinstance(node, ast.ClassDef):
                yield name, node
        yield from functions(node, name)


def positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many arguments a function takes by position, ``self`` and ``cls`` not counted."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def public(name: str) -> bool:
    return all(not part.startswith("_") or part == "__init__" for part in name.split("."))


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_no_module_imports_itself_on_any_way():
    found = circles(graph(modules(ROOT)))
    assert not found, "\n".join(" <-> ".join(circle) for circle in found)


def test_every_room_has_its_height():
    for folder, order in ORDER.items():
        rooms = {path.stem for path in (PACKAGE / folder).iterdir() if path.suffix == ".py" or path.is_dir()}
        assert {room for room in rooms if not room.startswith("__")} == set(order)


def test_no_import_runs_back_up():
    arrows = graph(modules(ROOT))
    found = [line for folder, order in ORDER.items() for line in back_up(folder, order, arrows)]
    assert not found, "\n".join(found)


def test_no_folder_shows_more_rooms_than_one_takes_in():
    crowded = {}
    for folder in {path.parent for path in sources()}:
        rooms = {path.stem for path in folder.glob("*.py")} | {
            path.parent.stem for path in folder.glob("*/__init__.py")
        }
        rooms = {room for room in rooms if not room.startswith("__")}
        if len(rooms) > ROOMS:
            crowded[str(folder.relative_to(ROOT))] = sorted(rooms)
    assert not crowded


def test_functions_are_short():
    long = {
        f"{path.relative_to(PACKAGE).as_posix()} {name}": node.end_lineno - node.lineno + 1
        for path in sources()
        for name, node in functions(ast.parse(path.read_text(encoding="utf-8")))
        if node.end_lineno is not None and node.end_lineno - node.lineno >= LINES
    }
    assert {name: lines for name, lines in long.items() if name not in LONG_FUNCTIONS} == {}
    assert set(LONG_FUNCTIONS) <= set(long), "no longer long: take them out of the list"
    assert len(long) <= LONG


def test_public_functions_take_few_arguments_by_position():
    wide = {
        f"{path.relative_to(PACKAGE).as_posix()} {name}": positional(node)
        for path in sources()
        if "kernels" not in path.parts
        for name, node in functions(ast.parse(path.read_text(encoding="utf-8")))
        if public(name) and positional(node) > PARAMETERS
    }
    assert not wide


def test_lines_are_short():
    """Counted here, too: the linter lets a line pass that ends in an address or is one word."""
    wide = [
        f"{path.relative_to(ROOT).as_posix()}:{number}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > WIDTH
    ]
    assert wide == []


def package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "quantkit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_circles_are_seen_through_functions_type_checking_and_packages(tmp_path):
    root = package(
        tmp_path,
        {
            "__init__.py": "",
            "a/__init__.py": "from quantkit.a import x\n",  # a package and a module in it
            "a/x.py": "from quantkit.a import NAME\n",
            "b.py": "def f():\n    from quantkit import c\n",
            "c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import quantkit.d\n",
            "d.py": "from quantkit.b import f\n",
            "e.py": "import quantkit.e\n",
            "f.py": "from quantkit.b import f\nfrom quantkit.a.x import NAME\n",  # above them, in none
        },
    )
    assert circles(graph(modules(root))) == [
        ["quantkit.a", "quantkit.a.x"],
        ["quantkit.b", "quantkit.c", "quantkit.d"],
        ["quantkit.e"],
    ]


def test_what_runs_back_up_is_seen(tmp_path):
    root = package(
        tmp_path,
        {
            "convert/__init__.py": "def f():\n    from quantkit.convert.high import f\n",  # the front door opens on all
            "convert/low/__init__.py": "",
            "convert/low/x.py": "from quantkit.convert.low import y\n",
            "convert/low/y.py": "\n\ndef f():\n    from quantkit.convert.high import f\n",
            "convert/high.py": "from quantkit.convert.low.x import y\n",
        },
    )
    assert back_up("convert", ["low", "high"], graph(modules(root))) == [
        "quantkit.convert.low.y:4 imports quantkit.convert.high"
    ]


def test_arguments_and_names_are_counted_as_they_are_called():
    tree = ast.parse(
        "class A:\n    def __init__(self, a, /, b, *c, d):\n        def inner(e): ...\n    def _f(cls, *, g): ...\n"
    )
    assert {name: (positional(node), public(name)) for name, node in functions(tree)} == {
        "A.__init__": (2, True),
        "A.__init__.inner": (1, True),
        "A._f": (0, False),
    }
