# SPDX-License-Identifier: Apache-2.0
"""Lays a problem out in a context of a given number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_sparse.tasks.corpus import NOISE, documents
from sglang_sparse.tasks.encoding import ASSISTANT, END, USER, Encoder
from sglang_sparse.tasks.sample import FillerStyle, Needle
from sglang_sparse.tasks.words import Split

Ids = NDArray[np.int32]
_RUN_TOKENS = (64, 1200)


def _encode_all(encoder: Encoder, texts: Sequence[str]) -> list[list[int]]:
    batch = getattr(encoder, "encode_batch", None)
    if batch is not None:
        encoded: list[list[int]] = batch(texts)
        return encoded
    return [encoder.encode(text) for text in texts]


class PieceArray:
    """Encoded pieces behind one another, sliceable by piece."""

    def __init__(self, encoder: Encoder, pieces: Sequence[str]) -> None:
        """Encode ``pieces`` one by one."""
        self.texts: Sequence[str] = list(pieces)
        encoded = _encode_all(encoder, self.texts)
        self.ids: Ids = np.fromiter((t for e in encoded for t in e), dtype=np.int32)
        self.offsets = np.concatenate(([0], np.cumsum([len(e) for e in encoded]))).astype(np.int64)

    def __len__(self) -> int:
        return len(self.texts)

    def fitting(self, first: int, tokens: int) -> int:
        """One past the last piece that fits when ``tokens`` may be used from piece ``first`` on."""
        limit = int(self.offsets[first]) + tokens
        return int(np.searchsorted(self.offsets, limit, side="right")) - 1


class DoesNotFit(ValueError):
    """Needles that are longer than their context."""


@dataclass(frozen=True)
class Context:
    """A laid-out context: its text, its token ids, and where each needle went."""

    text: str
    ids: Ids
    spans: tuple[tuple[int, int], ...]


class ContextBuilder:
    """Hides needles in filler of one split; every draw comes from the generator it is given."""

    def __init__(self, encoder: Encoder, split: Split, text: PieceArray | None = None) -> None:
        """Encode the split's filler once (about a second for the held-out split).

        Args:
            text: other filler, taken instead.
        """
        self.encoder = encoder
        self.split: Split = split
        self.text = text or PieceArray(encoder, [p for doc in documents(split) for p in doc])
        self.noise = PieceArray(
            encoder, [(" " if i % 5 else "\n") + s for i, s in enumerate(NOISE * 1400)]
        )

    def filler_runs(
        self, rng: np.random.Generator, tokens: int, style: FillerStyle
    ) -> list[tuple[PieceArray, int, int]]:
        """Runs of consecutive pieces, at most ``tokens`` long together and nearly as long."""
        if style == "noise":
            last = min(self.noise.fitting(0, tokens), len(self.noise))
            return [(self.noise, 0, last)] if last else []
        pool, runs, left = self.text, [], tokens
        while left > 8:
            first = int(rng.integers(len(pool)))
            wanted = min(left, int(rng.integers(*_RUN_TOKENS)))
            last = pool.fitting(first, wanted)
            if last > first:
                runs.append((pool, first, last))
                left -= int(pool.offsets[last] - pool.offsets[first])
            elif left < 64:
                break
        return runs

    def build(
        self,
        rng: np.random.Generator,
        needles: Sequence[Needle],
        tokens: int,
        style: FillerStyle = "text",
        body: Sequence[str] | None = None,
    ) -> Context:
        """A context of at most ``tokens`` tokens with every needle near its depth.

        Raises:
            DoesNotFit: the needles alone are too long.
        """
        if body is not None:
            text = "".join(body)
            return Context(text, np.asarray(self.encoder.encode(text), dtype=np.int32), ())
        order = sorted(range(len(needles)), key=lambda i: needles[i].depth)
        texts = [_written(needles[i], "\n" if rng.random() < 0.5 else " ") for i in order]
        encoded = [np.asarray(e, dtype=np.int32) for e in _encode_all(self.encoder, texts)]
        room = tokens - sum(len(e) for e in encoded)
        if room < 0:
            raise DoesNotFit(
                f"{len(needles)} needles need {tokens - room} tokens, {tokens} allowed"
            )
        runs = self.filler_runs(rng, room, style)
        return _weave(runs, texts, encoded, [needles[i].depth for i in order], order)


def _written(needle: Needle, lead: str) -> str:
    """A needle as it stands in the context; a turn is a question, its answer and a new message."""
    if needle.reply is None:
        return lead + needle.text
    return f"\n\n{needle.text}{END}{ASSISTANT}{needle.reply}{END}{USER}"


def _weave(
    runs: list[tuple[PieceArray, int, int]],
    texts: list[str],
    encoded: list[Ids],
    depths: list[float],
    order: list[int],
) -> Context:
    ends: list[NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
    filler: list[Ids] = [np.zeros(0, dtype=np.int32)]
    pieces: list[str] = []
    total = 0
    for pool, first, last in runs:
        ends.append(pool.offsets[first + 1 : last + 1] - pool.offsets[first] + total)
        filler.append(pool.ids[pool.offsets[first] : pool.offsets[last]])
        pieces.extend(pool.texts[first:last])
        total = int(ends[-1][-1])
    boundaries, flat = np.concatenate(ends), np.concatenate(filler)
    out_ids: list[Ids] = []
    out_text: list[str] = []
    spans: list[tuple[int, int]] = [(0, 0)] * len(texts)
    piece = position = 0
    for text, ids, depth, original in zip(texts, encoded, depths, order, strict=True):
        nearest = int(np.searchsorted(boundaries, depth * total))
        stop = min(max(nearest, piece), len(pieces))
        chunk = flat[boundaries[piece] : boundaries[stop]]
        out_ids += [chunk, ids]
        out_text += ["".join(pieces[piece:stop]), text]
        position += len(chunk)
        spans[original] = (position, position + len(ids))
        position, piece = position + len(ids), stop
    out_ids.append(flat[boundaries[piece] :])
    out_text.append("".join(pieces[piece:]))
    return Context("".join(out_text), np.concatenate(out_ids).astype(np.int32), tuple(spans))
