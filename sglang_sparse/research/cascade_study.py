# SPDX-License-Identifier: Apache-2.0
"""What a cascading cache remembers beyond its window, beside sinks and a window of equal size.

Passkeys lie before everything that a window of equal size still holds. One level is that window
(StreamingLLM, evicted in strides); the other arms are the ablation of the paper's section 4.6.

    python -m sglang_sparse.research.cascade_study --out FILE.json --lengths 8192 16384
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sglang_sparse.research.arguments import study_parser
from sglang_sparse.research.cascade import CascadeDecoder
from sglang_sparse.research.export import load
from sglang_sparse.research.model import ReferenceModel
from sglang_sparse.tasks import FileEncoder, TaskSuite
from sglang_sparse.tasks.sample import Sample
from sglang_sparse.tasks.scoring import extract, is_exact, wilson
from sglang_sparse_kernels.cascade import AttentionAverage, CascadeShape


@dataclass(frozen=True)
class Arm:
    """One cache: how many levels share the window, and whether tokens compete by attention."""

    levels: int
    scored: bool = True

    @property
    def name(self) -> str:
        """For the table."""
        if self.levels == 1:
            return "sinks and window"
        return f"{self.levels} levels" + ("" if self.scored else ", scores off")


ARMS = (Arm(1), Arm(2), Arm(4), Arm(8), Arm(4, scored=False))


class CascadeStudy:
    """Runs arms over passkeys and text, and collects JSON-ready rows."""

    def __init__(
        self, model: ReferenceModel, encoder: FileEncoder, *, window: int, stride: int, sinks: int
    ) -> None:
        self.model, self.encoder = model, encoder
        self.suite = TaskSuite(encoder, "heldout")
        self.sizes = {"window": window, "stride": stride, "sinks": sinks}
        self.rows: list[dict[str, Any]] = []

    def decoder(self, arm: Arm) -> CascadeDecoder:
        """An arm's cache; the paper's beta."""
        shape = CascadeShape(levels=arm.levels, **self.sizes)
        return CascadeDecoder(self.model, shape, AttentionAverage(0.9999), scored=arm.scored)

    def passkeys(self, length: int, count: int, seed: int) -> list[Sample]:
        """Samples whose key no window of equal size still holds, evenly spread before it."""
        held = self.sizes["window"] + self.sizes["stride"]
        most = 1 - 1.1 * held / length
        if most <= 0:
            raise ValueError(f"prompts of {length} tokens lie inside of {held} that are held")
        depths = [most * (i + 0.5) / count for i in range(count)]
        found = [self.suite.sample("passkey", length, seed, i, d) for i, d in enumerate(depths)]
        for sample in found:
            assert max(end for _, end in sample.needle_spans) < len(sample.prompt_ids) - held
        return found

    def remember(self, arm: Arm, samples: list[Sample], length: int) -> dict[str, Any]:
        """Share of passkeys, and of their digits, that are answered."""
        decoder, right, digits = self.decoder(arm), 0, 0.0
        for sample in samples:
            said = decoder.reply(sample.prompt_ids, len(sample.answer_ids))
            reply = self.encoder.decode(said)
            right += is_exact(sample, reply)
            digits += digits_right(sample, reply)
        low, high = wilson(right, len(samples))
        row = {
            "arm": asdict(arm), "name": arm.name, "length": length, "count": len(samples),
            "exact": right / len(samples), "low": low, "high": high,
            "digits": digits / len(samples),
        }  # fmt: skip
        self.rows.append(row)
        return row

    @torch.no_grad()
    def loss(self, arm: Arm, tokens: int, count: int) -> dict[str, Any]:
        """Mean loss of the tokens of texts that lie beyond what is held, in nats."""
        decoder, losses = self.decoder(arm), []
        for ids in self.suite.heldout_text(tokens, count):
            decoder.reset()
            first = decoder.shape.rows
            hidden = decoder.feed(ids)[first:-1]
            target = torch.tensor(ids[first + 1 :], device=hidden.device)
            losses.append(float(F.cross_entropy(self.model.logits(hidden), target)))
        row = {
            "arm": asdict(arm), "name": arm.name, "tokens": tokens, "count": count,
            "loss": sum(losses) / len(losses),
        }  # fmt: skip
        self.rows.append(row)
        return row


def digits_right(sample: Sample, reply: str) -> float:
    """Share of the key's digits that stand at their place in the reply's first number."""
    key, found = sample.values[0], (*extract(sample, reply), "")[0]
    return sum(a == b for a, b in zip(key, found, strict=False)) / len(key)


def summary(result: dict[str, Any]) -> str:
    """A Markdown table, a row an arm."""
    rows = result["rows"]
    lengths = sorted({row["length"] for row in rows if "length" in row})
    heads = [f"{n:,} tokens: exact, % (digits)" for n in lengths]
    lines = ["| | " + " | ".join([*heads, "loss of text"]) + " |"]
    lines.append("| --- " + "| ---: " * (len(lengths) + 1) + "|")
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        cells = []
        for length in lengths:
            (row,) = (r for r in mine if r.get("length") == length)
            cells.append(f"{100 * row['exact']:.0f} ({100 * row['digits']:.0f})")
        loss = next((f"{r['loss']:.3f}" for r in mine if "loss" in r), "")
        lines.append("| " + " | ".join([name, *cells, loss]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the study, write its rows, and print the table."""
    p = study_parser(__doc__)
    p.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384])
    p.add_argument("--count", type=int, default=96, help="passkeys a cell")
    p.add_argument("--texts", type=int, default=8, help="texts for the loss; 0 for none")
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--window", type=int, default=1024)
    p.add_argument("--stride", type=int, default=256)
    p.add_argument("--sinks", type=int, default=64)
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    study = CascadeStudy(
        load(args.model).to(device).eval(), FileEncoder(args.model),
        window=args.window, stride=args.stride, sinks=args.sinks,
    )  # fmt: skip
    result = {"sizes": study.sizes, "seed": args.seed, "device": device, "rows": study.rows}
    for length in args.lengths:
        samples = study.passkeys(length, args.count, args.seed)
        for arm in ARMS:
            print(study.remember(arm, samples, length), flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.texts:
        for arm in ARMS:
            print(study.loss(arm, min(args.lengths), args.texts), flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(summary(result), end="")


if __name__ == "__main__":
    main()
