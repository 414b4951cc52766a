# SPDX-License-Identifier: Apache-2.0
"""Whether what the last request on a prefix selected is of use to the next one.

``python -m sglang_sparse.research.prefix_lists --out prefix-lists.json [--table tables.md]``

A request decodes an answer behind a document and ends. Another one comes back to the document: with
the same question, with another one, or as the next turn of the chat (:mod:`.returning`). What a
radix tree could hold of the first one is cut to the prefix that the second one shares with it.
Three uses are counted over the second one's first ten decode steps:

- *frames*: blocks that are fetched to frames (:mod:`.frames`) before decoding begins.
- *stops*: where PSA expects to stop in its first step.
- *bounds*: the top-k begins its search at a score that k units are known to reach.

Each is compared with what needs no other request: what the second request's own last prompt token
selects, its step before, and what the code does today.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from sglang_sparse.research.arguments import preset_study_parser, show_table
from sglang_sparse.research.export import load
from sglang_sparse.research.frames import FramePool
from sglang_sparse.research.host_frames import BLOCK, Block, preset_policy
from sglang_sparse.research.returning import (
    CONTEXTS,
    SCENES,
    STEPS,
    Head,
    Return,
    Run,
    contexts,
    play,
)
from sglang_sparse.tasks import FileEncoder, TaskSuite

PRESETS = ("sparcas", "kascade", "page_minmax", "psa", "psa_sketch")
TIMES = 4  # frames, in budgets
AT_FIRST = 8  # microbatches that a request slot expects before its first request
BLOCK_MAXIMA = 8  # units of which the top-k holds the largest score
THRESHOLDS = ("today", "last", "opening", "prompt", "step before")

Row = dict[str, Any]
Start = Callable[[Return, int], list[list[Block]]]
Guess = Callable[[Return, int], dict[Head, int]]

# What frames hold when decoding begins: nothing, what the first request's last or first decode step
# attended to, or what the second request's last prompt token selects.
STARTS: dict[str, Start] = {
    "empty": lambda back, block: [],
    "last": lambda back, block: back.first.blocks(back.first.last, block, back.shared),
    "opening": lambda back, block: back.first.blocks(1, block, back.shared),
    "prompt": lambda back, block: back.second.blocks(0, block),
    "last + prompt": lambda back, block: [
        *STARTS["last"](back, block),
        *STARTS["prompt"](back, block),
    ],
}
# Where a KV head may be expected to stop: at a constant; where the request slot's former owner
# stopped last, which is what servers expect; and as above.
GUESSES: dict[str, Guess] = {
    "constant": lambda back, step: dict.fromkeys(back.second.depths(step), AT_FIRST),
    "slot": lambda back, step: (
        {} if back.stranger is None else back.stranger.depths(back.stranger.last)
    ),
    "last": lambda back, step: back.first.depths(back.first.last),
    "opening": lambda back, step: back.first.depths(1),
    "prompt": lambda back, step: back.second.depths(0),
    "step before": lambda back, step: back.second.depths(step - 1),
}


def frames(returns: Sequence[Return], block: int) -> dict[str, Any]:
    """How many blocks of the first ten steps were on the device, by what frames held at first.

    Returns:
        ``blocks``: touched in a step. ``budget``: frames of one budget. ``before``: share of the
        blocks of steps 2 to 10 that the step before touched. ``in_vain``: share of the first
        request's last lists that none of the ten steps touched. For each of :data:`STARTS`, with
        four budgets of frames: ``first``, the share of step 1 that was there, and ``loads``, blocks
        fetched in the ten steps, in budgets. ``most_first`` and ``least_loads``: with any number of
        frames.
    """
    hits = {room: {start: [0, 0] for start in STARTS} for room in ("some", "any")}
    first = later = again = left = used = 0
    budgets = []
    for back in returns:
        steps = [back.second.blocks(step, block) for step in range(1, 1 + STEPS)]
        touched = [{one for layer in layers for one in layer} for layers in steps]
        last = {one for layer in STARTS["last"](back, block) for one in layer}
        budgets.append(max(1, round(back.second.recording.tokens(block) / block)))
        first, later = first + len(touched[0]), later + sum(map(len, touched[1:]))
        again += sum(len(now & old) for now, old in zip(touched[1:], touched, strict=False))
        left, used = left + len(last), used + len(last & set().union(*touched))
        for room, count in {"some": TIMES * budgets[-1], "any": 1 << 40}.items():
            for start, of in STARTS.items():
                pool = FramePool(count)
                for layer in of(back, block):
                    pool.touch(layer)
                found = [sum(pool.touch(layer) for layer in layers) for layers in steps]
                hits[room][start][0] += found[0]
                hits[room][start][1] += sum(found[1:])
    every = first + later
    loads = {
        room: {start: (every - sum(found)) / sum(budgets) for start, found in row.items()}
        for room, row in hits.items()
    }
    return {
        "blocks": every / len(returns) / STEPS,
        "budget": mean(budgets),
        "before": again / later,
        "in_vain": 1 - used / max(1, left),
        "first": {start: found[0] / first for start, found in hits["some"].items()},
        "loads": loads["some"],
        "most_first": {start: found[0] / first for start, found in hits["any"].items()},
        "least_loads": loads["any"],
    }


def stops(returns: Sequence[Return]) -> dict[str, Any]:
    """How well each of :data:`GUESSES` says where PSA stops in step 1.

    ``step before`` is judged in steps 2 to 10.

    Returns:
        ``depth``: microbatches up to the stop, mean. For each guess ``covered``: share of KV heads
        that stop at or before it; ``layers``: share of layers in which all do; ``short`` and
        ``in_vain``: microbatches that it lacks or adds, over those up to the stop.
    """
    found: dict[str, Any] = {}
    for name, guess in GUESSES.items():
        layers: list[list[tuple[int, int]]] = []  # each head's stop and the guess, by layer
        for back in returns:
            for step in range(2, 1 + STEPS) if name == "step before" else (1,):
                known, pairs = guess(back, step), dict[int, list[tuple[int, int]]]()
                for head, depth in back.second.depths(step).items() if known else ():
                    pairs.setdefault(head[0], []).append((depth, max(1, known[head])))
                layers += pairs.values()
        heads = [pair for layer in layers for pair in layer]
        if not heads:
            continue
        depth = sum(stop for stop, _ in heads)
        if name == "constant":
            found["depth"] = depth / len(heads)
        found[name] = {
            "covered": mean(guessed >= stop for stop, guessed in heads),
            "layers": mean(all(g >= stop for stop, g in layer) for layer in layers),
            "short": sum(max(0, stop - g) for stop, g in heads) / depth,
            "in_vain": sum(max(0, g - stop) for stop, g in heads) / depth,
        }
    return found


def bounds(returns: Sequence[Return]) -> dict[str, Any]:
    """Candidates of the top-k's search for each unit that wins, by where its threshold is from.

    Returns:
        ``today``: the threshold is the k-th largest maximum of 8 units, as kernels take it, or the
        k-th best score where these are too few. ``last``, ``opening``, ``prompt`` (all in step 1)
        and ``step before``: the least score that units of the old list have now. Each has
        ``candidates`` (median) and ``many`` (nine in ten are below), over k, and ``short``: the
        share of searches whose threshold fewer than k units reach.
    """
    ratios: dict[str, list[float]] = {}
    for back in returns:
        for step in range(1, 1 + STEPS):
            for layer, rows in back.second.scores[step].items():
                for head, row in enumerate(rows):
                    for name, ratio in _searches(back, step, (layer, head), row).items():
                        ratios.setdefault(name, []).append(ratio)
    return {
        name: {
            "candidates": median(found),
            "many": sorted(found)[int(0.9 * (len(found) - 1))],
            "short": mean(ratio < 1 for ratio in found),
        }
        for name, found in ratios.items()
    }


def _searches(back: Return, step: int, head: Head, row: Tensor) -> dict[str, float]:
    """Candidates over k, by where the threshold is from."""
    run = back.second
    always = run.always(step)
    units = -(-run.recording.steps[step][0] // run.policy.unit)
    free = torch.ones(units, dtype=torch.bool)
    free[always] = False
    scores = row[:units].masked_fill(~free, -torch.inf)
    k = len(run.units(step, head)) - len(always)

    def reaching(threshold: float) -> float:
        return int((scores >= threshold).sum()) / k

    def least_of(old: Run, at: int, shared: int | None = None) -> float:
        kept = old.units(at, head, shared)
        # What was selected whatever its score says nothing of the scores that win.
        kept = kept[(kept < units) & ~torch.isin(kept, old.always(at))]
        kept = kept[free[kept]]
        return reaching(float(scores[kept].min())) if len(kept) else 0.0

    padded = torch.nn.functional.pad(scores, (0, -units % BLOCK_MAXIMA), value=-torch.inf)
    maxima = padded.view(-1, BLOCK_MAXIMA).amax(1)
    held = scores if len(maxima) < 2 * k else maxima
    found = {"today": reaching(float(held.topk(k).values[-1]))}
    if step > 1:
        return found | {"step before": least_of(run, step - 1)}
    return found | {
        "last": least_of(back.first, back.first.last, back.shared),
        "opening": least_of(back.first, 1, back.shared),
        "prompt": least_of(run, 0),
    }


def study(returns: dict[str, list[Return]]) -> dict[str, list[Row]]:
    """Rows of frames, by preset, scene and size of a block; of stops and bounds, by preset."""
    result: dict[str, list[Row]] = {"frames": [], "stops": [], "bounds": []}
    for preset, all_of in returns.items():
        policy = all_of[0].second.policy
        by_scene = {scene: [b for b in all_of if b.scene == scene] for scene in SCENES}
        for scene, found in by_scene.items():
            for block in dict.fromkeys((policy.unit, BLOCK)) if found else ():
                row = {"preset": preset, "scene": scene, "block": block, "requests": len(found)}
                result["frames"].append(row | _flat(frames(found, block)))
            if policy.epsilon and found:
                result["stops"].append({"preset": preset, "scene": scene} | _flat(stops(found)))
        if not policy.epsilon:
            result["bounds"].append({"preset": preset} | _flat(bounds(all_of)))
    return result


def _flat(nested: dict[str, Any]) -> Row:
    """Columns ``a.b`` for entries of entries, with three significant digits."""
    columns: Row = {}
    for name, value in nested.items():
        inner = value if isinstance(value, dict) else {"": value}
        columns |= {f"{name}.{key}".strip("."): float(f"{one:.3g}") for key, one in inner.items()}
    return columns


def tables(result: dict[str, list[Row]]) -> list[str]:
    """Markdown tables: frames (blocks of the preset's own unit), stops, bounds."""
    own: dict[str, int] = {}
    for row in result["frames"]:
        own.setdefault(row["preset"], row["block"])
    firsts = [name for name in STARTS if name != "empty"]
    ahead = [
        [f"`{row['preset']}`", row["scene"], _percent(row["before"])]
        + [_percent(row[f"first.{start}"]) for start in firsts]
        + [f"{row[f'loads.{start}']:.2f}" for start in STARTS]
        for row in result["frames"]
        if row["block"] == own[row["preset"]]
    ]
    heads = ["preset", "comes back with", "in the step before, %"]
    heads += [f"step 1 in `{start}`, %" for start in firsts]
    found = [_table(heads + [f"loads after `{start}`" for start in STARTS], ahead, 2)]
    guesses = [name for name in GUESSES if any(f"{name}.covered" in r for r in result["stops"])]
    depths = [
        [f"`{row['preset']}`", row["scene"], f"{row['depth']:.1f}"]
        + [
            " / ".join(_percent(row[f"{guess}.{key}"]) for key in ("covered", "layers", "in_vain"))
            for guess in guesses
        ]
        for row in result["stops"]
    ]
    heads = ["preset", "comes back with", "microbatches", *(f"`{name}`" for name in guesses)]
    found.append(_table(heads, depths, 2))
    searches = [
        [f"`{row['preset']}`"]
        + [f"{row[f'{name}.candidates']:.1f} ({row[f'{name}.many']:.1f})" for name in THRESHOLDS]
        for row in result["bounds"]
    ]
    found.append(_table(["preset", *(f"`{name}`" for name in THRESHOLDS)], searches, 1))
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A table whose first ``words`` columns are words, the others numbers."""
    lines = [heads, ["---"] * words + ["---:"] * (len(heads) - words), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def text_of(length: int, result: dict[str, list[Row]]) -> str:
    """The result as compact JSON: the columns of each table, then a row a line."""
    parts = [f'{{"length":{length}']
    for name, rows in result.items():
        lines = [list(rows[0]) if rows else [], *(list(row.values()) for row in rows)]
        text = ",\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
        parts.append(f'"{name}":[{text}]')
    return ",\n".join(parts) + "}\n"


def read(path: Path) -> dict[str, list[Row]]:
    """The rows that :func:`text_of` wrote."""
    found = json.loads(path.read_text())
    return {
        name: [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
        for name, lines in found.items()
        if name != "length"
    }


def main() -> None:
    """Measure, write the rows, and print the tables."""
    p = preset_study_parser(__doc__, PRESETS)
    p.add_argument("--tasks", nargs="+", default=list(CONTEXTS))
    p.add_argument("--length", type=int, default=8192, help="tokens of a document")
    p.add_argument("--count", type=int, default=3, help="documents of each task")
    p.add_argument("--seed", type=int, default=11)
    args = p.parse_args()
    suite = TaskSuite(FileEncoder(args.model), "heldout")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = list(contexts(suite, args.tasks, args.length, args.count, args.seed))
    policies = {name: preset_policy(name, args.length) for name in args.presets}
    returns = play(load(args.model).to(device).eval(), given, policies)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text_of(args.length, study(returns)))
    show_table("\n".join(tables(read(args.out))), args.table)


if __name__ == "__main__":
    main()
