# SPDX-License-Identifier: Apache-2.0
"""Which test files reach SGLang, so that they run on each supported version and the others once.

A file reaches SGLang if importing it does: by the imports of the file itself, of the
`conftest.py` files above it, and of all modules that these load. What a function imports when it is
called counts in tests alone. Elsewhere it cannot be told whether a test calls it, nor what a
process imports that a test starts. So tests that do not reach SGLang run without one
(:func:`hide_sglang`), and a file of which that is not true says ``pytest.mark.sglang``.
"""

import ast
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
SGLANG = ("sglang", "sgl_kernel")
MARKS = {"pytest.mark.sglang", "pytest.mark.server"}
# Where a module is looked for by its dotted name, beside the folder of the file that imports it.
_ROOTS = tuple(
    ROOT / folder
    for folder in (
        *(".", "kernels", "kernels/bench", "radix_ext", "loadtest", "loadtest/programs", "docs"),
        *("tests/support", "tests/gpu"),
    )
)


@cache
def _parsed(file: Path, test: bool) -> tuple[frozenset[str], bool]:
    """Dotted names that a file imports, in tests also in functions; whether it has a mark."""
    tree = ast.parse(file.read_text())
    package = _package(file)
    names = set()
    for node in _running(tree, called=test):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    marked = any(ast.unparse(node) in MARKS for node in attributes)
    return frozenset(names), marked


def _running(node: ast.AST, called: bool) -> Iterator[ast.AST]:
    """The parts of a file that run: not what is for type checkers, functions only if `called`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if not called and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield child
        yield from _running(child, called)


def _package(file: Path) -> str:
    """Dotted name of the package that a file belongs to; empty for a script."""
    parts: list[str] = []
    folder = file.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


@cache
def _files(name: str, beside: Path) -> tuple[Path, ...]:
    """Files that an import of a dotted name runs: packages on the way, and the module."""
    parts = name.split(".")
    found = []
    for root in {beside: None} | dict.fromkeys(_ROOTS):
        found += [root.joinpath(*parts[:n], "__init__.py") for n in range(1, len(parts) + 1)]
        found.append(root.joinpath(*parts).with_suffix(".py"))
    return tuple(file.resolve() for file in found if file.exists())


def reaches_sglang(test: Path, tests: Path = TESTS) -> bool:
    """Whether a test file imports SGLang, itself or through others, or says that it needs it.

    Args:
        test: the file.
        tests: the folder of all tests, whose own `conftest.py` does not count.
    """
    test = test.resolve()
    folders = [folder for folder in test.parents if folder != tests and tests in folder.parents]
    waiting = [test, *(f for f in (folder / "conftest.py" for folder in folders) if f.exists())]
    seen = set(waiting)
    while waiting:
        file = waiting.pop()
        names, marked = _parsed(file, tests in file.parents)
        if marked or any(name.split(".")[0] in SGLANG for name in names):
            return True
        fresh = {found for name in names for found in _files(name, file.parent)} - seen
        seen |= fresh
        waiting += fresh
    return False


def hide_sglang(folder: Path) -> None:
    """Make SGLang impossible to import, here and in every process that is started from now on.

    Args:
        folder: an empty one, for the modules that stand in its place.
    """
    for name in SGLANG:
        # None ends an import with ModuleNotFoundError; the stubs of Python do not know that.
        sys.modules[name] = None  # type: ignore[assignment]
        (folder / f"{name}.py").write_text(
            f"raise ImportError('this test runs once for all versions: no {name} for it')\n"
        )
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
