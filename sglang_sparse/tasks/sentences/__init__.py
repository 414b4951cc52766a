# SPDX-License-Identifier: Apache-2.0
"""Plain English sentences that state a fact, as templates: two files beside this module.

``heldout.txt`` has those of the held-out split, ``training.txt.bz2`` those that training alone
sees. In both, a line ``# NAME`` stands above the sentences of a relation, or of ``visits`` or
``votes``.
``sglang_sparse.research.pack_sentences`` writes the second.
"""

import bz2
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent


def parse(text: str) -> dict[str, tuple[str, ...]]:
    """Sentences by the name above them.

    Raises:
        ValueError: a sentence stands above all names.
    """
    found: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        if line.startswith("# "):
            name = line[2:]
        elif name is None:
            raise ValueError(f"no name above {line!r}")
        else:
            found.setdefault(name, []).append(line)
    return {name: tuple(lines) for name, lines in found.items()}


@cache
def heldout() -> dict[str, tuple[str, ...]]:
    """The held-out split's sentences by name."""
    return parse((_HERE / "heldout.txt").read_text())


@cache
def training() -> dict[str, tuple[str, ...]]:
    """Sentences that training alone sees, by name."""
    return parse(bz2.decompress((_HERE / "training.txt.bz2").read_bytes()).decode())
