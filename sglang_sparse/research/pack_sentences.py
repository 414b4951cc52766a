# SPDX-License-Identifier: Apache-2.0
"""Packs sentences that training alone sees: ``python -m sglang_sparse.research.pack_sentences``.

Of a folder with a file ``NAME.txt`` for each relation, one template a line.
"""

import argparse
import bz2
from pathlib import Path

PACKED = Path(__file__).parents[1] / "tasks" / "sentences" / "training.txt.bz2"


def pack(folder: Path) -> bytes:
    """All files of ``folder`` in one compressed text; the same files give the same bytes."""
    parts = [
        f"# {file.stem}\n{file.read_text().strip()}\n" for file in sorted(folder.glob("*.txt"))
    ]
    return bz2.compress("".join(parts).encode())


def main() -> None:
    """Pack a folder into the archive that the tasks read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=PACKED)
    args = parser.parse_args()
    args.out.write_bytes(pack(args.folder))


if __name__ == "__main__":
    main()
