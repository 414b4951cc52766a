# SPDX-License-Identifier: Apache-2.0
"""Files and calls stay small enough to be read at once."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("sglang_sparse", "kernels", "radix_ext", "loadtest", "tests", "docs", ".ci")
MOST_LINES, MOST_PARAMETERS = 400, 10
# Triton takes no records of tensors, and each option of a command is a parameter.
EXEMPT = ("triton.jit", "app.command", "calibrate_app.command")


def files() -> Iterator[tuple[str, str]]:
    """Path and text of every Python file of the project."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            yield str(path.relative_to(ROOT)), path.read_text()


def test_no_file_has_more_than_400_lines() -> None:
    lengths = {name: text.count("\n") for name, text in files()}
    assert len(lengths) > 300
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_no_function_has_more_than_10_parameters() -> None:
    large, exempt = [], 0
    for name, text in files():
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(argument.arg not in ("self", "cls") for argument in given)
            if count > MOST_PARAMETERS:
                decorators = (ast.unparse(decorator) for decorator in node.decorator_list)
                if any(decorator.startswith(EXEMPT) for decorator in decorators):
                    exempt += 1
                else:
                    large.append(f"{name}:{node.lineno} {node.name} takes {count}")
    assert exempt > 20
    assert large == []
