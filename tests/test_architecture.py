"""Rooms import in one direction, only one names Megatron, and files and functions stay small."""

import ast
from pathlib import Path

import pytest

import hf_megapack

PACKAGE = Path(hf_megapack.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# What each room or top-level module may import from hf_megapack, besides itself. batch and errors are everyone's.
MAY_IMPORT = {
    "batch": set(),
    "errors": set(),
    "picture": set(),
    "packing": {"picture"},
    "kernels": set(),
    "data": {"packing"},
    "weights": set(),
    "megatron": {"weights", "kernels", "packing"},
    "arguments": set(),
    "container": set(),
    "launcher": set(),
    "learning_rate": set(),
    "values": set(),
    "optimizer": {"arguments", "guard"},
    "config": {"arguments", "launcher", "learning_rate", "optimizer", "values"},
    "command_line": {"config"},
    "ranks": set(),
    "meter": {"data", "packing"},
    "guard": {"ranks"},
    "streaming": {"config", "data"},
    "loading": {"config", "data", "packing", "ranks", "streaming"},
    "inspect": {"config", "data", "loading", "packing", "picture"},
    "saving": {"config", "ranks", "weights"},
    "resuming": {"data", "streaming"},
    "settled": {"config"},
    "agreement": {"arguments", "config", "ranks"},
    "checks": {"arguments", "config", "data", "guard", "meter", "optimizer"},
    "trained": {"config", "data", "weights"},
    "trainer": {
        "agreement",
        "batch",
        "checks",
        "config",
        "container",
        "data",
        "guard",
        "loading",
        "megatron",
        "meter",
        "ranks",
        "resuming",
        "saving",
        "settled",
        "streaming",
        "trained",
        "weights",
    },
    "__init__": set(),
}
EVERYONES = {"batch", "errors"}
NOT_IN_PACKING = {"torch", "transformers", "megatron", "datasets", "peft", "accelerate"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60


def room_of(path: Path) -> str:
    """Return the folder, or the module's own name at the top level."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_modules(path: Path, root: Path = PACKAGE) -> set[str]:
    """Return the dotted names that a file imports anywhere, also inside functions; relative imports made absolute.

    Imports under `if TYPE_CHECKING` count for nothing: they do not run.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = ["hf_megapack", *path.relative_to(root).parts[:-1]]
    names = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [] if node.level == 0 else package[: len(package) - node.level + 1]
            module = ".".join([*base, *([node.module] if node.module else [])])
            names.update({module} if module != "hf_megapack" else {f"hf_megapack.{a.name}" for a in node.names})
    return names


def own_imports(path: Path) -> set[str]:
    """Return the rooms of hf_megapack that a file imports."""
    dotted = (name.split(".") for name in imported_modules(path))
    return {parts[1] for parts in dotted if parts[0] == "hf_megapack" and len(parts) > 1}


def test_the_reader_of_imports_sees_all_forms(tmp_path):
    source = "import a.b\nfrom c import d\ndef f():\n    from hf_megapack import config\n    from ..errors import E\n"
    path = tmp_path / "room" / "file.py"
    path.parent.mkdir()
    path.write_text(source + "if TYPE_CHECKING:\n    import unseen\n")
    assert imported_modules(path, tmp_path) == {"a.b", "c", "hf_megapack.config", "hf_megapack.errors"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_below_it(path):
    room = room_of(path)
    assert room in MAY_IMPORT, f"{room} is a new room: say in MAY_IMPORT what it may import"
    forbidden = own_imports(path) - MAY_IMPORT[room] - EVERYONES - {room}
    assert forbidden == set()


def test_the_table_has_no_ring():
    order: list[str] = []
    remaining = {room: set(below) for room, below in MAY_IMPORT.items()}
    while remaining:
        free = [room for room, below in remaining.items() if below <= set(order)]
        assert free, f"these import each other in a ring: {sorted(remaining)}"
        order += free
        remaining = {room: below for room, below in remaining.items() if room not in free}
    assert len(order) == len(MAY_IMPORT)


def test_only_one_room_names_megatron_and_packing_is_numpy_alone():
    seen_megatron = 0
    for path in FILES:
        top = {name.split(".")[0] for name in imported_modules(path)}
        if room_of(path) == "megatron":
            seen_megatron += "megatron" in top
        else:
            assert "megatron" not in top, path
        if room_of(path) in ("packing", "batch", "errors"):
            assert not top & NOT_IN_PACKING, path
    assert seen_megatron > 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_small_and_say_what_they_are_for(path):
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "every module says its job in its first line"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            documented = ast.get_docstring(node, clean=False)
            length -= len(documented.splitlines()) if documented else 0
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines without its docstring"
