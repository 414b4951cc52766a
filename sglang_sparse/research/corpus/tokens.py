# SPDX-License-Identifier: Apache-2.0
"""Encodes the corpus into one file: ``python -m sglang_sparse.research.corpus.tokens --help``.

It is an xz stream of a NumPy archive. Training and evaluation need it and the tokenizer alone.
"""

import argparse
import io
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sglang_sparse.research.corpus.build import DOCUMENT_END
from sglang_sparse.tasks.encoding import BOS, SPECIAL_TOKENS, FileEncoder
from sglang_sparse.tasks.words import SPLITS, Split

Ids = NDArray[np.uint16]
_AT_ONCE = 64


@dataclass(frozen=True)
class Corpus:
    """Token ids of both splits, ``[tokens]``; each document begins with ``<|bos|>``."""

    train: Ids
    heldout: Ids

    def documents(self, split: Split, bos: int) -> list[Ids]:
        """The documents of a split, without the token ``bos`` before each."""
        ids = self.train if split == "train" else self.heldout
        return [part[1:] for part in np.split(ids, np.flatnonzero(ids == bos))[1:]]


def encode(folder: Path, encoder: FileEncoder) -> Corpus:
    """Encode the corpus that was built into ``folder``.

    Raises:
        ValueError: the vocabulary does not fit in 16 bits.
    """
    if encoder.vocab_size > 2**16:
        raise ValueError(f"a vocabulary of {encoder.vocab_size} tokens does not fit in 16 bits")
    bos = encoder.token_id(BOS)
    arrays: dict[Split, Ids] = {}
    for split in SPLITS:
        texts = (folder / f"{split}.txt").read_text().split(DOCUMENT_END)[:-1]
        parts: list[Ids] = []
        for start in range(0, len(texts), _AT_ONCE):
            for ids in encoder.encode_batch(texts[start : start + _AT_ONCE]):
                parts.append(np.asarray([bos, *ids], dtype=np.uint16))
        arrays[split] = np.concatenate(parts)
    return Corpus(arrays["train"], arrays["heldout"])


def save(corpus: Corpus, path: Path) -> None:
    """Write a token file."""
    buffer = io.BytesIO()
    np.savez(buffer, train=corpus.train, heldout=corpus.heldout)
    # Ids have two bytes, whence two positions.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lp": 1, "lc": 2}]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(buffer.getvalue(), filters=filters))


def load(path: Path) -> Corpus:
    """Read a token file.

    Raises:
        FileNotFoundError: there is none.
    """
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
        return Corpus(arrays["train"], arrays["heldout"])


def token_sizes(encoder: FileEncoder) -> NDArray[np.int64]:
    """``[vocab]``: bytes of text of each token of a byte-level tokenizer; markers have none."""
    pieces = map(encoder.piece, range(encoder.vocab_size))
    return np.array([0 if p in SPECIAL_TOKENS else len(p) for p in pieces], dtype=np.int64)


def main() -> None:
    """Encode a built corpus into a token file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of a built corpus")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the token file, such as tokens.xz")
    args = parser.parse_args()
    corpus = encode(args.corpus, FileEncoder(args.tokenizer))
    save(corpus, args.out)
    sizes = f"{len(corpus.train):,} training and {len(corpus.heldout):,} held-out tokens"
    print(f"{args.out}: {sizes}, {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
