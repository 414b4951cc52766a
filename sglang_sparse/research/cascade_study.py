# SPDX-License-Identifier: Apache-2.0
"""What a cascading cache remembers beyond its window, beside sinks and a window of equal size.

Passkeys lie before everything that a window of equal size still holds. One level is that window
(StreamingLLM, evicted in strides); the other arms are the ablation of the paper's section 4.6. As
in its section 4.3, a key is scored by the digits that stand at their place. Of tokens side by side
a level keeps one of two, so a key that is said once loses digits in each head; `--mentions` says it
several times in a row. The paper's released evaluation says it six times, has eight levels, pools
heads by the maximum and counts digits: `--mentions 6 --reduce max`.

    python -m sglang_sparse.research.cascade_study --out FILE.json --lengths 8192 16384

The table is written beside the JSON, as Markdown. Intervals are of 95 %.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
from sglang_sparse_kernels.cascade.types import REDUCTIONS


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


BETA = 0.9999  # the preset's
AVERAGE = AttentionAverage(BETA)
ARMS = (Arm(1), Arm(2), Arm(4), Arm(8), Arm(4, scored=False), Arm(8, scored=False))


class CascadeStudy:
    """Runs arms over passkeys and text, and collects JSON-ready rows."""

    def __init__(
        self, model: ReferenceModel, encoder: FileEncoder, *, window: int, stride: int, sinks: int,
        average: AttentionAverage = AVERAGE, batch: int = 1,
    ) -> None:  # fmt: skip
        """``batch``: prompts that are computed side by side."""
        self.model, self.encoder, self.batch = model, encoder, batch
        self.suite = TaskSuite(encoder, "heldout")
        self.sizes = {"window": window, "stride": stride, "sinks": sinks}
        self.average = average
        self.rows: list[dict[str, Any]] = []

    def decoder(self, arm: Arm, *, positions: bool = False) -> CascadeDecoder:
        """An arm's cache."""
        shape = CascadeShape(levels=arm.levels, **self.sizes)
        return CascadeDecoder(
            self.model, shape, self.average, scored=arm.scored, slots=self.batch,
            positions=positions,
        )  # fmt: skip

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

    def remember(
        self, arm: Arm, samples: list[Sample], length: int, mentions: int = 1
    ) -> dict[str, Any]:
        """Share of passkeys, and of their digits, that are answered; how much of them is held."""
        decoder, right, digits = self.decoder(arm, positions=True), 0, []
        held: list[tuple[float, float]] = []
        for at in range(0, len(samples), self.batch):
            some = samples[at : at + self.batch]
            most = max(len(sample.answer_ids) for sample in some)
            said = decoder.replies([sample.prompt_ids for sample in some], most)
            for slot, (sample, ids) in enumerate(zip(some, said, strict=True)):
                held.append(decoder.held(slot, *sample.needle_spans[0]))
                reply = self.encoder.decode(ids[: len(sample.answer_ids)])
                right += is_exact(sample, reply)
                digits.append(digits_right(sample, reply))
        (length_of_key,) = {len(sample.values[0]) for sample in samples}
        row = {
            "arm": asdict(arm), "name": arm.name, "length": length, "mentions": mentions,
            "count": len(samples),
            "exact": right / len(samples), "exact_interval": wilson(right, len(samples)),
            "digits": statistics.fmean(digits) / length_of_key, "digits_of_each": digits,
            "held_by_head": statistics.fmean(one for one, _ in held),
            "held_by_layer": statistics.fmean(some for _, some in held),
        }  # fmt: skip
        same = (length, mentions)
        window = next((r for r in self.rows if _is_window(r) and _passkeys(r) == same), None)
        if window is not None:
            pairs = zip(digits, window["digits_of_each"], strict=True)
            gains = [(a - b) / length_of_key for a, b in pairs]
            row |= {"gain": statistics.fmean(gains), "gain_interval": interval(gains)}
        self.rows.append(row)
        return row

    @torch.no_grad()
    def loss(self, arm: Arm, tokens: int, count: int) -> dict[str, Any]:
        """Mean loss of the tokens of texts that lie beyond what is held, in nats."""
        decoder, losses = self.decoder(arm), []
        texts = list(self.suite.heldout_text(tokens, count))
        for at in range(0, count, self.batch):
            some = texts[at : at + self.batch]
            decoder.reset()
            for ids, states in zip(some, decoder.feed_all(some), strict=True):
                first = decoder.shape.rows
                target = torch.tensor(ids[first + 1 :], device=states.device)
                logits = self.model.logits(states[first:-1])
                losses.append(float(F.cross_entropy(logits, target)))
        row = {
            "arm": asdict(arm), "name": arm.name, "tokens": tokens, "count": count,
            "loss": statistics.fmean(losses), "loss_of_each": losses,
        }  # fmt: skip
        window = next((r for r in self.rows if _is_window(r) and r.get("tokens") == tokens), None)
        if window is not None:
            more = [a - b for a, b in zip(losses, window["loss_of_each"], strict=True)]
            row |= {"more": statistics.fmean(more), "more_interval": interval(more)}
        self.rows.append(row)
        return row


def _is_window(row: dict[str, Any]) -> bool:
    return bool(row["arm"]["levels"] == 1)


def _passkeys(row: dict[str, Any]) -> tuple[int, int] | None:
    """Length of the prompts and mentions of the key; None of a row about text."""
    return (row["length"], row["mentions"]) if "length" in row else None


def repeated(sample: Sample, mentions: int) -> Sample:
    """``sample`` with its needle as often in a row."""
    ids, (begin, end) = list(sample.prompt_ids), sample.needle_spans[0]
    more = ids[begin:end] * (mentions - 1)
    return replace(
        sample,
        prompt_ids=ids[:end] + more + ids[end:],
        needle_spans=((begin, end + len(more)),),
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Normal interval of 95 % of a mean; of one value, the value."""
    mean = statistics.fmean(values)
    half = 1.96 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return mean - half, mean + half


def digits_right(sample: Sample, reply: str) -> int:
    """Digits of the key that stand at their place in the reply's first number."""
    key, found = sample.values[0], (*extract(sample, reply), "")[0]
    return sum(a == b for a, b in zip(key, found, strict=False))


def summary(result: dict[str, Any]) -> str:
    """A Markdown table, a row an arm."""
    rows = result["rows"]
    kinds = list(dict.fromkeys(found for row in rows if (found := _passkeys(row)) is not None))
    heads = [
        f"{length:,} tokens, said {times}: digits, % (exact; held by a head; gain)"
        for length, times in kinds
    ]
    texts = list(dict.fromkeys(row["tokens"] for row in rows if "loss" in row))
    heads += [f"loss of text of {tokens:,} tokens (more)" for tokens in texts]
    lines = ["| | " + " | ".join(heads) + " |"]
    lines.append("| --- " + "| ---: " * len(heads) + "|")
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        cells = [_cell(row) for kind in kinds for row in mine if _passkeys(row) == kind]
        cells += [""] * (len(kinds) - len(cells))
        cells += [_loss(row) for tokens in texts for row in mine if row.get("tokens") == tokens]
        cells += [""] * (len(heads) - len(cells))
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    said = f"{100 * row['exact']:.0f}; {100 * row['held_by_head']:.0f}"
    if "gain" in row:
        low, high = row["gain_interval"]
        said += f"; {100 * row['gain']:+.1f}, {100 * low:+.1f} to {100 * high:+.1f}"
    return f"{100 * row['digits']:.1f} ({said})"


def _loss(row: dict[str, Any]) -> str:
    if "more" not in row:
        return f"{row['loss']:.3f}"
    low, high = row["more_interval"]
    return f"{row['loss']:.3f} ({row['more']:+.3f}, {low:+.3f} to {high:+.3f})"


def main() -> None:
    """Run the study, write its rows and the table, and print it."""
    p = study_parser(__doc__)
    p.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384])
    p.add_argument("--count", type=int, default=96, help="passkeys a cell")
    p.add_argument("--mentions", type=int, nargs="*", default=[1, 4, 8])
    p.add_argument("--texts", type=int, default=8, help="texts for the loss; 0 for none")
    p.add_argument("--text-tokens", type=int, nargs="+", help="their lengths; that of --lengths")
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--window", type=int, default=1024)
    p.add_argument("--stride", type=int, default=256)
    p.add_argument("--sinks", type=int, default=64)
    p.add_argument("--beta", type=float, default=BETA)
    p.add_argument("--reduce", choices=REDUCTIONS, default="mean")
    p.add_argument("--batch", type=int, default=32, help="prompts that are computed side by side")
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    study = CascadeStudy(
        load(args.model).to(device).eval(), FileEncoder(args.model),
        window=args.window, stride=args.stride, sinks=args.sinks,
        average=AttentionAverage(args.beta, args.reduce), batch=args.batch,
    )  # fmt: skip
    result = {
        "sizes": study.sizes, "beta": args.beta, "reduce": args.reduce, "seed": args.seed,
        "device": device, "rows": study.rows,
    }  # fmt: skip

    def told(row: dict[str, Any]) -> None:
        print({k: v for k, v in row.items() if not k.endswith("_of_each")}, flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(summary(result))

    for length in args.lengths:
        once = study.passkeys(length, args.count, args.seed)
        for mentions in args.mentions:
            samples = [repeated(sample, mentions) for sample in once]
            for arm in ARMS:
                told(study.remember(arm, samples, length, mentions))
    for tokens in args.text_tokens or [min(args.lengths)] if args.texts else []:
        for arm in ARMS:
            told(study.loss(arm, tokens, args.texts))
    print(summary(result), end="")


if __name__ == "__main__":
    main()
