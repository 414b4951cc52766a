# SPDX-License-Identifier: Apache-2.0
"""Puts what ``research.measure`` found into the repository.

``python -m sglang_sparse.research.publish --commit COMMIT --device "NVIDIA H200"``

Raw files are stored by columns (``research.tables``), with the device and the commit. What was not
measured stays as it is. Presets that were calibrated are left where they are. Then
``research.card`` fills the model card's tables.
"""

import argparse
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_sparse.research.tables import by_columns, pack

Table = dict[str, Any]
_DECIMALS = 12
_LENGTHS = ("4k", "8k", "16k", "32k")


def _columns(table: Table) -> Table:
    packed: Table = by_columns(table)
    return packed


def _as_it_is(table: Table) -> Table:
    return table


# In the folder of the reference model's presets: which study's result, and how it is stored.
FILES: dict[str, tuple[str, Callable[[Table], Table]]] = {
    **{f"model/study/table_{n}.json.gz": (f"table_{n}", pack) for n in _LENGTHS},
    "model/study/ablation_4k.json": ("ablation_4k", _as_it_is),
    "model/study/decode.json.gz": ("decode", pack),
    "psa-report/presets/presets.json.gz": ("presets", _columns),
    "kascade-report/accuracy.json.gz": ("accuracy", pack),
    "cascade-report/passkeys.json.gz": ("passkeys", _as_it_is),
    "cascade-report/texts.json.gz": ("texts", _as_it_is),
    "cascade-report/decode.json.gz": ("cascade_decode", _as_it_is),
    "fp8-report/fp8.json.gz": ("fp8", _as_it_is),
    "sparcas-report/refresh.json.gz": ("refresh", _as_it_is),
    "lserve-report/arms.json.gz": ("arms", pack),
}
COPIED = {"psa-report/presets/table.md": "presets.md"}


def rounded(content: Any) -> Any:
    """JSON whose numbers have twelve decimals at most: more tell nothing, and take room."""
    if isinstance(content, dict):
        return {key: rounded(value) for key, value in content.items()}
    if isinstance(content, list):
        return [rounded(value) for value in content]
    return round(content, _DECIMALS) if isinstance(content, float) else content


def write(path: Path, table: Table) -> None:
    """Write JSON without blanks, compressed if ``path`` ends so, the same bytes each time."""
    text = json.dumps(rounded(table), separators=(",", ":"))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    else:
        path.write_text(text + "\n")


def joined(tables: list[Table]) -> Table:
    """The results of one study at several lengths as one.

    Raises:
        ValueError: they have other seeds or splits.
    """
    seeds = {(table["seed"], table["split"]) for table in tables}
    if len(seeds) != 1:
        raise ValueError(f"results of different seeds or splits: {sorted(seeds)}")
    first = {key: tables[0][key] for key in ("seed", "split")}
    return first | {"cells": [cell for table in tables for cell in table["cells"]]}


def publish(studies: Path, reference: Path, source: dict[str, str]) -> list[str]:
    """Store all results below ``studies`` in ``reference``; returns what was written.

    Args:
        source: Device and commit, stored in each file that has no such keys.
    """
    written = []

    def store(name: str, table: Table) -> None:
        write(reference / name, table | {k: v for k, v in source.items() if k not in table})
        written.append(name)

    def result(name: str) -> Table | None:
        path = studies / f"{name}.json"
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        return {key: value for key, value in found.items() if value != []}  # measured, that is

    for name, (study, how) in FILES.items():
        if (found := result(study)) is not None:
            store(name, how(found))
    shipped = [found for n in _LENGTHS if (found := result(f"shipped_{n}")) is not None]
    if len(shipped) == len(_LENGTHS):
        store("model/study/shipped.json.gz", pack(joined(shipped)))
    if (text := result("text")) is not None:
        for old in (reference / "model" / "study").glob("text-*.json"):
            old.unlink()
        store(f"model/study/text-{source['commit']}.json", text)
    for name, copy in COPIED.items():
        if (studies / copy).exists():
            shutil.copy(studies / copy, reference / name)
            written.append(name)
    return written


def main() -> None:
    """Store what was measured."""
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--studies", type=Path, default=Path("build/studies"))
    p.add_argument("--reference", type=Path, default=Path("configs/reference"))
    p.add_argument("--commit", required=True, help="what was measured, seven digits")
    p.add_argument("--device", required=True, help="what it was measured on")
    args = p.parse_args()
    for name in publish(
        args.studies, args.reference, {"device": args.device, "commit": args.commit}
    ):
        print(name)


if __name__ == "__main__":
    main()
