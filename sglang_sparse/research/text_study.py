# SPDX-License-Identifier: Apache-2.0
"""Perplexity a byte on held-out English, beside ``gzip -9`` and a 5-gram model of the same text.

``python -m sglang_sparse.research.text_study --model FOLDER --corpus tokens.xz --out text.json``

Documents are read in windows, each token given all before it in its window. How much context helps
is measured on the same tokens: the last ones of a window, given the last 512 tokens, 1,024 and so
on. The baselines take a few minutes of a CPU; ``--baselines FILE`` keeps them.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from sglang_sparse.research.baselines import gzip_bits, ngram_bits
from sglang_sparse.research.corpus.tokens import Corpus, Ids, load, token_sizes
from sglang_sparse.research.export import load as load_model
from sglang_sparse.research.model import ReferenceModel
from sglang_sparse.tasks.encoding import BOS, FileEncoder

WINDOW = 8192
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
SCORED = 256
_STRIDE = 4096


class TextStudy:
    """Losses of a model on documents."""

    def __init__(self, model: ReferenceModel, bos: int, sizes: NDArray[np.int64]) -> None:
        """Take a model, the token that begins a text, and the bytes of each token."""
        self.model, self.bos, self.sizes = model, bos, sizes

    def nats(self, ids: Ids, scored: int) -> tuple[float, int]:
        """Loss in nats of the last ``scored`` of ``ids``, given those before, and their bytes."""
        device = next(self.model.parameters()).device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        row = torch.from_numpy(np.concatenate(([self.bos], ids.astype(np.int64)))).to(device)
        with torch.no_grad():
            hidden = self.model(row[None, :-1], dtype)[0, -scored:]
            logits = self.model.logits(hidden).float()
            loss = float(F.cross_entropy(logits, row[-scored:], reduction="sum"))
        return loss, int(self.sizes[ids[-scored:]].sum())

    def whole(self, documents: Sequence[Ids], window: int = WINDOW) -> float:
        """Bits a byte of all tokens, in windows of at most ``window`` tokens."""
        parts = [d[i : i + window - 1] for d in documents for i in range(0, len(d), window - 1)]
        return _bits([self.nats(part, len(part)) for part in parts])

    def by_context(
        self, documents: Sequence[Ids], contexts: Sequence[int] = CONTEXTS, stride: int = _STRIDE
    ) -> dict[int, float]:
        """Bits a byte of the same tokens by how much context they are given, in tokens.

        Args:
            documents: those shorter than the longest context are left out.
            contexts: tokens that the model sees, those scored and the beginning included.
            stride: tokens from one place that is scored to the next.

        Raises:
            ValueError: no document is long enough.
        """
        most = max(contexts)
        places = [d[:end] for d in documents for end in range(most, len(d) + 1, stride)]
        if not places:
            raise ValueError(f"no document has {most} tokens")
        return {
            context: _bits([self.nats(p[len(p) - context + 1 :], SCORED) for p in places])
            for context in contexts
        }


def _bits(losses: list[tuple[float, int]]) -> float:
    return sum(loss for loss, _ in losses) / math.log(2) / sum(size for _, size in losses)


def baselines(corpus: Corpus, encoder: FileEncoder) -> dict[str, float]:
    """Bits a byte of both baselines on the held-out documents."""
    bos = encoder.token_id(BOS)
    texts = [encoder.decode(d.tolist()) for d in corpus.documents("heldout", bos)]
    sizes = token_sizes(encoder)
    return {"gzip -9": gzip_bits(texts), "5-gram": ngram_bits(corpus.train, corpus.heldout, sizes)}


def table(result: dict[str, Any]) -> str:
    """Markdown: bits and perplexity a byte of the model, of both baselines, and by context."""
    rows = [*result["baselines"].items(), (f"model, windows of {WINDOW:,}", result["whole"])]
    rows += [(f"model, {int(n):,} tokens of context", v) for n, v in result["by_context"].items()]
    lines = ["| | bits a byte | perplexity a byte |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {bits:.4f} | {2**bits:.4f} |" for name, bits in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the study."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", type=Path, default=Path("build/reference/export"))
    p.add_argument("--corpus", type=Path, required=True, help="file of research.corpus.tokens")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--baselines", type=Path, help="JSON; read if it is there, else written")
    args = p.parse_args()
    corpus, encoder = load(args.corpus), FileEncoder(args.model)
    if args.baselines and args.baselines.exists():
        found = json.loads(args.baselines.read_text())
    else:
        found = baselines(corpus, encoder)
        if args.baselines:
            args.baselines.write_text(json.dumps(found) + "\n")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bos = encoder.token_id(BOS)
    study = TextStudy(load_model(args.model).to(device).eval(), bos, token_sizes(encoder))
    documents = corpus.documents("heldout", bos)
    result = {
        "baselines": found,
        "whole": study.whole(documents),
        "by_context": study.by_context(documents),
    }
    args.out.write_text(json.dumps(result) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
