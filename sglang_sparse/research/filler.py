# SPDX-License-Identifier: Apache-2.0
"""Filler for training rows out of the corpus: pieces of token ids that needles fit between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from sglang_sparse.tasks.encoding import BOS, FileEncoder
from sglang_sparse.tasks.layout import PieceArray

_SENTENCE_ENDS = (".", "!", "?", ":", ";")


class _Texts(Sequence[str]):
    """The texts of pieces, decoded when asked for."""

    def __init__(self, pieces: TokenPieces) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        first, last = self.pieces.offsets[index : index + 2]
        return self.pieces.encoder.decode(self.pieces.ids[first:last].tolist())


class TokenPieces(PieceArray):
    """A text that is token ids already, cut where a line begins or a sentence has ended.

    A piece starts with whitespace, as :mod:`sglang_sparse.tasks.corpus` wants.
    """

    def __init__(self, encoder: FileEncoder, ids: NDArray[np.uint16]) -> None:
        """Cut ``ids``, ``[tokens]``; the tokens that begin documents are left out."""
        self.encoder = encoder
        self.ids = ids[ids != encoder.token_id(BOS)].astype(np.int32)
        pieces = [encoder.piece(i) for i in range(encoder.vocab_size)]
        line = np.array([p.startswith("Ċ") for p in pieces])  # a newline, as byte-level BPE has it
        space = np.array([p.startswith("Ġ") for p in pieces])
        ends = np.array([p.endswith(_SENTENCE_ENDS) for p in pieces])
        starts = line[self.ids]
        starts[1:] &= ~line[self.ids[:-1]]
        starts[1:] |= space[self.ids[1:]] & ends[self.ids[:-1]]
        starts[:1] = True
        self.offsets = np.append(np.flatnonzero(starts), len(self.ids)).astype(np.int64)
        self.texts = _Texts(self)

    def __len__(self) -> int:
        return len(self.offsets) - 1
