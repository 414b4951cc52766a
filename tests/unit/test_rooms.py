# SPDX-License-Identifier: Apache-2.0
"""Who imports whom: rooms import in one direction, and no files import each other in a circle."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "sglang_sparse": ROOT,
    "sglang_sparse_kernels": ROOT / "kernels",
    "sglang_sparse_radix": ROOT / "radix_ext",
}
# Top-level folder -> packages that it never imports.
FORBIDDEN = {
    "kernels/sglang_sparse_kernels": ("sglang", "sglang_sparse", "sglang_sparse_radix"),
    "kernels/bench": ("sglang",),  # one bench runs what a server compiles
    "radix_ext": ("sglang_sparse",),
    "loadtest": ("sglang_sparse", "sglang_sparse_radix", "sglang_sparse_kernels"),
}
# Room of sglang_sparse -> the other rooms and modules of sglang_sparse that it may import.
ROOMS = {
    "choices": set(),
    "config": {"choices"},
    "tasks": set(),
    "calibrate": {"config", "tasks"},
    "evaluate": {"config", "tasks", "request_options", "compat"},
    "research": {"config", "tasks", "calibrate"},
    "compat": {"config", "graph_variants", "launch", "native_cpu", "pools", "checks", "devices"},
    "speculation": {"compat", "config", "checks", "launch"},
    "backend": {
        *("__init__", "choices", "config", "compat", "checks", "launch", "facts", "banner"),
        *("pools", "graph_variants", "reach", "request_options"),
    },
}
# Room -> packages that nothing in it imports.
WITHOUT = {
    "config": ("torch", "sglang"),
    "choices": ("sglang",),
    "tasks": ("sglang",),
    "research": ("sglang",),
}


def modules() -> dict[str, Path]:
    """Every module of the three packages, by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in (folder / package).rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def imports(name: str, file: Path) -> Iterator[str]:
    """What a file imports, anywhere in it: modules of ours by full name, others as written."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES else base


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_top_level_rooms_import_only_downwards(folder: str) -> None:
    for file in (ROOT / folder).rglob("*.py"):
        for imported in imports(file.stem, file):
            assert imported.split(".")[0] not in FORBIDDEN[folder], f"{file} imports {imported}"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_sglang_sparse_import_only_what_they_may(room: str) -> None:
    assert (ROOT / "sglang_sparse" / room).is_dir()
    for name, file in MODULES.items():
        if name.split(".")[:2] != ["sglang_sparse", room]:
            continue
        for imported in imports(name, file):
            top, _, rest = imported.partition(".")
            assert top not in WITHOUT.get(room, ()), f"{name} imports {imported}"
            if top == "sglang_sparse":
                target = rest.split(".")[0] or "__init__"
                assert target in {room, *ROOMS[room]}, f"{name} imports {imported}"


def test_every_folder_of_sglang_sparse_is_a_room() -> None:
    folders = {init.parent.name for init in (ROOT / "sglang_sparse").glob("*/__init__.py")}
    assert folders == set(ROOMS)


def test_kinds_are_compared_in_choices_alone() -> None:
    for name, file in MODULES.items():
        if name.startswith(("sglang_sparse.choices", "sglang_sparse.research")):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                asked = [s for s in sides if isinstance(s, ast.Attribute) and s.attr == "kind"]
                assert not asked, f"{name}: {ast.unparse(node)}"


def test_nothing_that_ships_imports_research() -> None:
    for name, file in MODULES.items():
        if not name.startswith("sglang_sparse.research"):
            for imported in imports(name, file):
                assert not imported.startswith("sglang_sparse.research"), f"{name}: {imported}"


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {
        name: {target for target in imports(name, file) if target in MODULES} - {name}
        for name, file in MODULES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {' -> '.join(error.args[1])}")
