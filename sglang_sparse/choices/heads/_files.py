# SPDX-License-Identifier: Apache-2.0
"""Files that say which heads stream: JSON of this package, and TSV of DuoAttention's gates.

DuoAttention (arXiv 2410.10819) writes a gate for each layer, a line, and KV head, a column: 1 for a
head that needs all of the context, 0 for one that does without.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_sparse.choices.choice import InvalidConfig

_FILE_ALLOWED = "a JSON file of heads, or a TSV of gates with a line a layer and a column a KV head"
_FILE_REMEDY = "correct heads.file"

Gates = Sequence[Sequence[float]]


def read_heads(path: Path, sparsity: float | None) -> dict[str, Any]:
    """Return the keys of :class:`.streaming.StreamingHeads` that a file holds.

    Args:
        path: ends in `.tsv` if it holds gates, else it is JSON.
        sparsity: share of the heads that stream, for gates; None for half of them.

    Raises:
        InvalidConfig: it cannot be read, or holds anything else.
    """
    text = _text(path)
    if path.suffix != ".tsv":
        if sparsity is not None:
            raise InvalidConfig(
                f"heads.sparsity {sparsity} beside heads.file {path}, which lists heads",
                allowed="heads.sparsity with a .tsv of gates",
                remedy="leave out heads.sparsity",
            )
        return _from_json(path, text)
    gates = _gates(path, text)
    model = {"name": path.name, "num_hidden_layers": len(gates)}
    model["num_key_value_heads"] = len(gates[0])
    return {"streaming": lowest(gates, 0.5 if sparsity is None else sparsity), "model": model}


def lowest(gates: Gates, share: float) -> list[list[int]]:
    """Return the heads of each layer whose gates are below a quantile of all gates.

    As many as DuoAttention takes: those below the `share` quantile, interpolated linearly. Of equal
    gates those of lower layers, and there of lower heads, are taken first.
    """
    order = sorted(
        (gate, layer, head) for layer, row in enumerate(gates) for head, gate in enumerate(row)
    )
    # Rounded first: 0.7 * 10 is a little more than 7.
    count = math.ceil(round(share * (len(order) - 1), 9))
    found: list[list[int]] = [[] for _ in gates]
    for _, layer, head in order[:count]:
        found[layer].append(head)
    return [sorted(heads) for heads in found]


def _from_json(path: Path, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _unfit(path, f"is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise _unfit(path, f"holds a JSON {type(content).__name__}, not an object")
    known = {"model", "sink", "local", "prompt_local", "streaming", "calibration"}
    unknown = sorted(content.keys() - known)
    if unknown or "streaming" not in content:
        wrong = f"has the key {unknown[0]}" if unknown else "has no key streaming"
        raise InvalidConfig(
            f"heads.file {path} {wrong}",
            allowed=f"streaming, the heads of each layer, and {', '.join(sorted(known))}",
            remedy=_FILE_REMEDY,
        )
    return content


def read_gates(path: Path) -> list[list[float]]:
    """Return the gates of a TSV in DuoAttention's format, a row a layer and a column a KV head.

    Raises:
        InvalidConfig: it cannot be read, or holds anything else.
    """
    return _gates(path, _text(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise _unfit(path, f"cannot be read: {reason}") from error


def _gates(path: Path, text: str) -> list[list[float]]:
    rows = [line.split() for line in text.splitlines() if line.strip()]
    try:
        gates = [[float(word) for word in row] for row in rows]
    except ValueError as error:
        raise _unfit(path, f"holds something that is no number: {error}") from error
    if not gates or len({len(row) for row in gates}) > 1:
        raise _unfit(path, "has lines of different lengths, or none")
    wrong = next((gate for row in gates for gate in row if not 0.0 <= gate <= 1.0), None)
    if wrong is not None:
        raise InvalidConfig(
            f"heads.file {path} holds the gate {wrong}",
            allowed="gates from 0, a head that streams, to 1, one that needs all of the context",
            remedy=_FILE_REMEDY,
        )
    return gates


def _unfit(path: Path, problem: str) -> InvalidConfig:
    return InvalidConfig(f"heads.file {path} {problem}", allowed=_FILE_ALLOWED, remedy=_FILE_REMEDY)
