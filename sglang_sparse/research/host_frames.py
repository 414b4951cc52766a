# SPDX-License-Identifier: Apache-2.0
"""How often a decode step finds its KV on the device, were KV in host memory and frames in front.

``python -m sglang_sparse.research.host_frames --out frames.json [--table table.md]``

Each preset of the reference model decodes given tokens, and what each sparse layer and KV head
attends to is recorded. The recording is then played to pools of frames (:mod:`.frames`): one a
request, shared by its sparse layers and KV heads, empty when decoding begins. A block is so many
neighbouring tokens of one layer and KV head. Blocks with one of the recent tokens, which every list
holds, are always on the device and do not count.

A budget of frames is what the lists of one step hold: their tokens, over layers and KV heads,
divided by the tokens of a block. Where single tokens are selected, they touch many more blocks than
that, unless a block is a token.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_sparse.config import load_preset
from sglang_sparse.research.arguments import preset_study_parser, show_table
from sglang_sparse.research.decode import Decoder
from sglang_sparse.research.export import load
from sglang_sparse.research.frames import FramePool
from sglang_sparse.research.model import ReferenceModel
from sglang_sparse.research.policies import Policy
from sglang_sparse.research.preset_study import MODEL, policy_at
from sglang_sparse.tasks import FileEncoder, TaskSuite

PRESETS = ("sparcas", "kascade_sketch", "kascade", "page_minmax", "psa", "psa_sketch")
BUDGETS = (1, 2, 4)
BLOCK = 32  # tokens; selections of other units are measured in blocks of that unit, too
ANSWERS = ("multi_key", "multi_query", "variable_tracking")

Block = tuple[int, int, int]  # layer, KV head, number


@dataclass(frozen=True)
class Trace:
    """Prompts, and the tokens that are decoded behind each of them."""

    name: str
    prompts: list[list[int]]
    given: list[list[int]]


def text_trace(suite: TaskSuite, length: int, count: int, steps: int) -> Trace:
    """Consecutive held-out text: ``length`` tokens are the prompt, ``steps`` follow."""
    whole = list(suite.heldout_text(length + steps, count))
    return Trace("text", [w[:length] for w in whole], [w[length:] for w in whole])


def answer_trace(suite: TaskSuite, length: int, count: int, seed: int) -> Trace:
    """Questions about facts in a prompt of ``length`` tokens, and their right answers."""
    samples = [s for task in ANSWERS for s in suite.samples(task, length, count, seed)]
    return Trace("answers", [s.prompt_ids for s in samples], [s.answer_ids for s in samples])


def preset_policy(name: str, length: int) -> Policy:
    """The policy that a preset of the reference model is, at a context of ``length`` tokens."""
    return policy_at(load_preset(MODEL, name), length)


@dataclass(frozen=True)
class Recording:
    """What one request attended to.

    Attributes:
        steps: for each step its tokens so far, and the positions attended to by layer and KV head.
        recent: tokens up to the current one that every list holds.
    """

    steps: list[tuple[int, dict[tuple[int, int], Tensor]]]
    recent: int

    def touched(self, block: int) -> Iterator[list[list[Block]]]:
        """For each step the blocks that each sparse layer attends to, but for the recent ones."""
        for length, lists in self.steps:
            layers: dict[int, list[Block]] = {}
            for (layer, head), positions in lists.items():
                numbers = (positions // block).unique()
                there = numbers[numbers < (length - self.recent) // block].tolist()
                layers.setdefault(layer, []).extend((layer, head, number) for number in there)
            yield list(layers.values())

    def tokens(self, block: int) -> float:
        """Tokens that a step attends to, over layers and KV heads, recent blocks left out."""
        sums = [
            int((positions < (length - self.recent) // block * block).sum())
            for length, lists in self.steps
            for positions in lists.values()
        ]
        return sum(sums) / len(self.steps)


def record(decoder: Decoder, given: Sequence[int], policy: Policy) -> Recording:
    """Decode the given tokens behind one prompt under a policy."""
    length = int(decoder.prompt_lengths)
    steps = []
    for masks in decoder.replay(policy, torch.tensor([list(given)])):
        length += 1
        lists = {
            (layer, head): row[:length].nonzero().flatten().int().cpu()
            for layer, mask in masks.items()
            for head, row in enumerate(mask[0])
        }
        steps.append((length, lists))
    return Recording(steps, policy.recent)


def hit_rates(recordings: Sequence[Recording], block: int) -> dict[str, Any]:
    """Shares of the touched blocks that were on the device.

    Returns:
        ``blocks``: touched in a step, over layers and KV heads. ``budget``: frames of one budget.
        ``repeated``: share that the step before touched, too. ``earlier``: share that any earlier
        step touched, which is what no number of frames exceeds. ``frames``: hit rate by budgets of
        frames. All but the first step of a request are counted.
    """
    touched = repeated = earlier = steps = 0
    budgets = [max(1, round(r.tokens(block) / block)) for r in recordings]
    hits = dict.fromkeys(BUDGETS, 0)
    for recording, budget in zip(recordings, budgets, strict=True):
        pools = {times: FramePool(times * budget) for times in BUDGETS}
        seen: set[Block] = set()
        before: set[Block] = set()
        for number, layers in enumerate(recording.touched(block)):
            now = {one for blocks in layers for one in blocks}
            found = {
                times: sum(pool.touch(blocks) for blocks in layers) for times, pool in pools.items()
            }
            if number:
                touched, steps = touched + len(now), steps + 1
                repeated += len(now & before)
                earlier += len(now & seen)
                hits = {times: hits[times] + found[times] for times in BUDGETS}
            before, seen = now, seen | now
    return {
        "blocks": touched / steps,
        "budget": sum(budgets) / len(budgets),
        "repeated": repeated / touched,
        "earlier": earlier / touched,
        "frames": {str(times): hits[times] / touched for times in BUDGETS},
    }


def study(
    model: ReferenceModel, traces: Sequence[Trace], presets: Sequence[str], length: int
) -> dict[str, Any]:
    """A row for each trace, preset and size of a block."""
    rows = []
    for trace in traces:
        policies = {name: preset_policy(name, length) for name in presets}
        recordings: dict[str, list[Recording]] = {name: [] for name in presets}
        for prompt, given in zip(trace.prompts, trace.given, strict=True):
            decoder = Decoder(model, [prompt], len(given) + 1)
            for name, policy in policies.items():
                recordings[name].append(record(decoder, given, policy))
        for name, policy in policies.items():
            for block in dict.fromkeys((policy.unit, BLOCK)):
                row = {"trace": trace.name, "preset": name, "block": block}
                rows.append(row | hit_rates(recordings[name], block))
    counts = {t.name: {"requests": len(t.prompts), "steps": sum(map(len, t.given))} for t in traces}
    return {"length": length, "traces": counts, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """A Markdown table of a study."""
    lines = [
        "| decoded | preset | tokens a block | blocks a step touches, in budgets "
        "| also in the step before, % | in any step before, % "
        + "".join(f"| hits with {times} x the budget, % " for times in BUDGETS)
        + "|",
        "| --- | --- " + "| ---: " * (4 + len(BUDGETS)) + "|",
    ]
    for row in result["rows"]:
        shares = [row["repeated"], row["earlier"], *row["frames"].values()]
        lines.append(
            f"| {row['trace']} | `{row['preset']}` | {row['block']} "
            f"| {row['blocks'] / row['budget']:.1f} "
            + "".join(f"| {100 * share:.1f} " for share in shares)
            + "|"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, write the rows, and print the table."""
    p = preset_study_parser(__doc__, PRESETS)
    p.add_argument("--length", type=int, default=8192, help="tokens of a prompt")
    p.add_argument("--texts", type=int, default=4)
    p.add_argument("--steps", type=int, default=64, help="tokens decoded behind each text")
    p.add_argument("--answers", type=int, default=2, help="questions of each task")
    p.add_argument("--seed", type=int, default=7)
    args = p.parse_args()
    suite = TaskSuite(FileEncoder(args.model), "heldout")
    traces = [
        text_trace(suite, args.length, args.texts, args.steps),
        answer_trace(suite, args.length, args.answers, args.seed),
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = study(load(args.model).to(device).eval(), traces, args.presets, args.length)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    show_table(table(result), args.table)


if __name__ == "__main__":
    main()
