# SPDX-License-Identifier: Apache-2.0
"""Decoding that evicts a token at a time, beside decoding in strides, over a cascading cache.

Prompts evict at the ends of strides, as in the paper. Decoding in strides goes on like this, so
its state follows from the tokens alone, and needs room for a stride. A token at a time, the window
takes each new token at once by the paper's algorithm 2: one token is held beside the window. Both
decode the same tokens, which are given: the ends of held-out texts, and of prompts that ask for a
passkey. Three arms: strides; a token at a time with the same window, which holds fewer tokens; and
with a window larger by half a stride, which holds as many on average.

    python -m sglang_sparse.research.cascade_decode --out FILE.json

The table is written beside the JSON, as Markdown. Intervals are of 95 %.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_sparse.research.arguments import study_parser
from sglang_sparse.research.cascade import CascadeDecoder
from sglang_sparse.research.cascade_study import BETA, digits_right, interval, repeated
from sglang_sparse.research.export import load
from sglang_sparse.research.model import ReferenceModel
from sglang_sparse.tasks import FileEncoder, TaskSuite
from sglang_sparse.tasks.sample import Sample
from sglang_sparse_kernels.cascade import AttentionAverage, CascadeShape


def insert(tensors: Sequence[Tensor], scores: Tensor, shape: CascadeShape, row: int, tick: int,
           ) -> None:  # fmt: skip
    """Algorithm 2, in place, for the token in ``row`` behind a full window.

    Args:
        tensors: [layers, slots, H, rows, ...] that move, the scores among them.
        scores: [layers, slots, H, rows].
        shape: the cache's.
        row: where the token lies, at least ``shape.full``.
        tick: how many tokens behind the sinks came before it, at least ``shape.window``.
    """
    taking = next((i for i in range(shape.levels) if tick % 2**i), shape.levels)
    first = shape.sinks + (shape.levels - taking) * shape.level
    if taking < shape.levels:
        # The last level that takes a token gives up its oldest one, which competes with the newest
        # of the next level, in the row before.
        wins = scores[..., first] >= scores[..., first - 1]
        for x in tensors:
            where = wins.view(*wins.shape, *[1] * (x.dim() - wins.dim() - 1))
            x[:, :, :, first - 1] = torch.where(where, x[:, :, :, first], x[:, :, :, first - 1])
    for x in tensors:
        x[:, :, :, first : shape.full] = torch.cat(
            (x[:, :, :, first + 1 : shape.full], x[:, :, :, row : row + 1]), 3
        )


class TokenwiseDecoder(CascadeDecoder):
    """Prompts in strides; then :meth:`step` evicts before each token."""

    def settle(self, slots: int) -> None:
        """After the prompts of the first ``slots`` slots, insert what their open strides hold.

        Raises:
            ValueError: a prompt does not fill the window.
        """
        shape = self.shape
        self.seen = self.lengths[:slots]
        if min(self.seen) < shape.full:
            raise ValueError(f"prompts must have at least {shape.full} tokens")
        for slot, seen in enumerate(self.seen):
            mine = slice(slot, slot + 1)
            scores = self.state.scores[:, mine]
            index = torch.arange(shape.rows, device=scores.device).expand(scores.shape).clone()
            open_tokens = shape.held(seen) - shape.full
            for i in range(open_tokens):
                tick = seen - open_tokens + i - shape.sinks
                insert((index, scores), scores, shape, shape.full + i, tick)
            for x in (self.state.k, self.state.v):
                rows = index[..., None].expand(*index.shape, x.shape[-1])
                x[:, mine] = x[:, mine].gather(3, rows)
        self.lengths[:slots] = [shape.full] * slots

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Final hidden states [slots, hidden] of the next token of each request.

        A token lies in the row behind the window, and is inserted once it was attended to.
        """
        shape, state, slots = self.shape, self.state, len(tokens)
        found = torch.cat(self.feed_all([[token] for token in tokens]))
        ticks = [seen - shape.sinks for seen in self.seen]
        for tick in set(ticks):
            at = [slot for slot in range(slots) if ticks[slot] == tick]
            some = [x[:, at] for x in (state.k, state.v, state.scores)]
            insert(some, some[2], shape, shape.full, tick)
            for x, new in zip((state.k, state.v, state.scores), some, strict=True):
                x[:, at] = new
        self.seen = [seen + 1 for seen in self.seen]
        self.lengths[:slots] = [shape.full] * slots
        return found


@dataclass(frozen=True)
class Arm:
    """How decoding evicts, and the window."""

    name: str
    window: int
    stride: int
    tokenwise: bool = False

    def held(self, sinks: int) -> float:
        """Tokens that are held while decoding, on average."""
        return sinks + self.window + (1 if self.tokenwise else (self.stride + 1) / 2)


def arms(window: int, stride: int) -> list[Arm]:
    """The three arms; the larger window's prompts evict twice as often, since strides divide it."""
    half = stride // 2
    return [
        Arm("strides", window, stride),
        Arm("a token at a time, same window", window, stride, tokenwise=True),
        Arm("a token at a time, as many held", window + half, half, tokenwise=True),
    ]


class DecodeStudy:
    """Decodes given tokens with each arm, and collects JSON-ready rows."""

    def __init__(
        self, model: ReferenceModel, encoder: FileEncoder, *, sinks: int, levels: int,
        average: AttentionAverage, batch: int, decoded: int,
    ) -> None:  # fmt: skip
        """``decoded``: tokens of each text and prompt that are decoded, the last ones."""
        self.model, self.encoder = model, encoder
        self.suite = TaskSuite(encoder, "heldout")
        self.sinks, self.levels, self.average = sinks, levels, average
        self.batch, self.decoded = batch, decoded
        self.rows: list[dict[str, Any]] = []

    def decode(
        self, arm: Arm, texts: list[list[int]], reply: int = 0
    ) -> tuple[list[Tensor], list[list[int]]]:
        """Hidden states of each text's last ``decoded`` tokens, and ``reply`` greedy tokens.

        A text's last token is fed only if a reply follows, so its states are those that predict.
        The caller switches gradients off.
        """
        shape = CascadeShape(arm.window, self.sinks, self.levels, arm.stride)
        kind = TokenwiseDecoder if arm.tokenwise else CascadeDecoder
        decoder = kind(self.model, shape, self.average, slots=len(texts))
        given = [text[-self.decoded :] for text in texts]
        before = decoder.feed_all([text[: -self.decoded] for text in texts])
        states = [[one[-1:]] for one in before]
        if isinstance(decoder, TokenwiseDecoder):
            decoder.settle(len(texts))

        def fed(tokens: list[int]) -> Tensor:
            if isinstance(decoder, TokenwiseDecoder):
                return decoder.step(tokens)
            return torch.cat(decoder.feed_all([[token] for token in tokens]))

        steps = self.decoded if reply else self.decoded - 1
        for i in range(steps):
            new = fed([ids[i] for ids in given])
            for one, state in zip(states, new, strict=True):
                one.append(state[None])
        said: list[list[int]] = [[] for _ in texts]
        last = torch.cat([one[-1] for one in states])
        for i in range(reply):
            tokens = self.model.logits(last).argmax(-1).tolist()
            for ids, token in zip(said, tokens, strict=True):
                ids.append(token)
            if i + 1 < reply:
                last = fed(tokens)
        return [torch.cat(one[: self.decoded]) for one in states], said

    @torch.no_grad()
    def loss(self, arm: Arm, tokens: int, count: int) -> dict[str, Any]:
        """Mean loss of the decoded tokens of texts, in nats."""
        texts = list(self.suite.heldout_text(tokens, count))
        losses: list[float] = []
        for at in range(0, count, self.batch):
            some = texts[at : at + self.batch]
            for ids, states in zip(some, self.decode(arm, some)[0], strict=True):
                target = torch.tensor(ids[-self.decoded :], device=states.device)
                losses.append(float(F.cross_entropy(self.model.logits(states), target)))
        return self._row(arm, "loss", tokens, losses)

    @torch.no_grad()
    def digits(self, arm: Arm, samples: list[Sample], length: int) -> dict[str, Any]:
        """Share of the passkeys' digits that are answered."""
        shares: list[float] = []
        for at in range(0, len(samples), self.batch):
            some = samples[at : at + self.batch]
            most = max(len(sample.answer_ids) for sample in some)
            said = self.decode(arm, [list(sample.prompt_ids) for sample in some], most)[1]
            for sample, ids in zip(some, said, strict=True):
                reply = self.encoder.decode(ids[: len(sample.answer_ids)])
                shares.append(digits_right(sample, reply) / len(sample.values[0]))
        return self._row(arm, "digits", length, shares)

    def _row(self, arm: Arm, what: str, tokens: int, values: list[float]) -> dict[str, Any]:
        """Add a row: the mean, and how much more than with strides."""
        row = {
            "what": what, "arm": asdict(arm), "tokens": tokens, "count": len(values),
            "held": arm.held(self.sinks), "mean": statistics.fmean(values), "of_each": values,
        }  # fmt: skip
        base = next((r for r in self.rows if (r["what"], r["tokens"]) == (what, tokens)), None)
        if base is not None:
            more = [a - b for a, b in zip(values, base["of_each"], strict=True)]
            row |= {"more": statistics.fmean(more), "more_interval": interval(more)}
        self.rows.append(row)
        return row


def summary(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, a row an arm."""
    kinds = list(dict.fromkeys((row["what"], row["tokens"]) for row in rows))
    words = {"loss": "loss of text of {:,} tokens", "digits": "digits, {:,} tokens, %"}
    heads = [words[what].format(tokens) + " (more)" for what, tokens in kinds]
    lines = [f"| decoding | tokens held | {' | '.join(heads)} |"]
    lines.append("| --- | ---: " + "| ---: " * len(heads) + "|")
    for name in dict.fromkeys(row["arm"]["name"] for row in rows):
        mine = [row for row in rows if row["arm"]["name"] == name]
        cells = [
            _cell(row) for kind in kinds for row in mine if (row["what"], row["tokens"]) == kind
        ]
        lines.append("| " + " | ".join([name, f"{mine[0]['held']:,.1f}", *cells]) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    digits = row["what"] == "digits"
    scale, places = (100, 1) if digits else (1, 4)
    said = f"{scale * row['mean']:.{places}f}"
    if "more" not in row:
        return said
    more = [scale * x for x in (row["more"], *row["more_interval"])]
    one, low, high = (f"{x:+.{places}f}" for x in more)
    return f"{said} ({one}, {low} to {high})"


def main() -> None:
    """Run the study, write its rows and the table, and print it."""
    p = study_parser(__doc__)
    p.add_argument("--lengths", type=int, nargs="*", default=[8192], help="of passkeys' prompts")
    p.add_argument("--count", type=int, default=96, help="passkeys a cell")
    p.add_argument("--mentions", type=int, default=4, help="how often a key is said, in a row")
    p.add_argument("--text-tokens", type=int, nargs="*", default=[8192])
    p.add_argument("--texts", type=int, default=32)
    p.add_argument("--decoded", type=int, default=512, help="tokens that are decoded of each")
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--window", type=int, default=1024)
    p.add_argument("--stride", type=int, default=256)
    p.add_argument("--sinks", type=int, default=64)
    p.add_argument("--levels", type=int, default=4)
    p.add_argument("--beta", type=float, default=BETA)
    p.add_argument("--batch", type=int, default=32, help="texts that are decoded side by side")
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    study = DecodeStudy(
        load(args.model).to(device).eval(), FileEncoder(args.model), sinks=args.sinks,
        levels=args.levels, average=AttentionAverage(args.beta), batch=args.batch,
        decoded=args.decoded,
    )  # fmt: skip
    result = {
        "asked": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "device": device, "rows": study.rows,
    }  # fmt: skip

    def told(row: dict[str, Any]) -> None:
        print({k: v for k, v in row.items() if k != "of_each"}, flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(summary(study.rows))

    chosen = arms(args.window, args.stride)
    for length in args.lengths:
        samples = passkeys(study.suite, length, args)
        for arm in chosen:
            told(study.digits(arm, samples, length))
    for tokens in args.text_tokens:
        for arm in chosen:
            told(study.loss(arm, tokens, args.texts))
    print(summary(study.rows), end="")


def passkeys(suite: TaskSuite, length: int, args: Any) -> list[Sample]:
    """Samples whose key lies before all that is held when decoding begins, evenly spread."""
    held = args.window + 2 * args.stride + args.decoded
    most = 1 - 1.1 * held / length
    if most <= 0:
        raise ValueError(f"prompts of {length} tokens lie inside of {held}")
    depths = [most * (i + 0.5) / args.count for i in range(args.count)]
    found = [suite.sample("passkey", length, args.seed, i, d) for i, d in enumerate(depths)]
    return [repeated(sample, args.mentions) for sample in found]


if __name__ == "__main__":
    main()
