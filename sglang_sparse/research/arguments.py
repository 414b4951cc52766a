# SPDX-License-Identifier: Apache-2.0
"""What the command lines of all studies share."""

import argparse
from pathlib import Path


def study_parser(about: str | None, out: str | None = None) -> argparse.ArgumentParser:
    """A parser with the flags ``--model`` and ``--out``.

    Args:
        about: what the study does.
        out: file for the rows unless ``--out`` says otherwise; None if it must.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--model", type=Path, default=Path("configs/reference/model"))
    parser.add_argument(
        "--out", type=Path, required=out is None, default=None if out is None else Path(out)
    )
    return parser


def preset_study_parser(about: str | None, presets: tuple[str, ...]) -> argparse.ArgumentParser:
    """The same for a study of presets, by default ``presets``, that makes a table."""
    parser = study_parser(about)
    parser.add_argument("--table", type=Path, help="file for the table as Markdown")
    parser.add_argument("--presets", nargs="+", default=list(presets))
    return parser


def show_table(table: str, path: Path | None) -> None:
    """Print a study's table, and write it to ``path``, which is ``--table``, if there is one."""
    if path is not None:
        path.write_text(table)
    print(table, end="")
