# SPDX-License-Identifier: Apache-2.0
"""Answers of the reference model's presets, as they are shipped, on any task.

``python -m sglang_sparse.research.shipped --out shipped.json [--table table.md]``

Every preset is asked the same prompts. They are prefilled densely, but for ``cascade``, which drops
tokens of prompts, too. With ``lserve`` the heads that stream see their window while it decodes, as
a server's do from ``min_sparse_tokens`` on.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sglang_sparse.config import SparseConfig, StreamingHeads, load_preset
from sglang_sparse.research.arguments import preset_study_parser, show_table
from sglang_sparse.research.card import preset_table
from sglang_sparse.research.cascade import CascadeDecoder
from sglang_sparse.research.decode import Decoder
from sglang_sparse.research.export import load
from sglang_sparse.research.heads_study import streaming_heads, window_of
from sglang_sparse.research.policies import Policy
from sglang_sparse.research.preset_study import MODEL, policy_at, selecting_policy
from sglang_sparse.research.study import Study
from sglang_sparse.tasks import TASKS, FileEncoder, Sample, is_exact

PRESETS = (
    "page_minmax", "sparcas", "kascade", "kascade_sketch", "psa", "psa_sketch", "lserve", "cascade",
)  # fmt: skip
SLOTS = 32
FED_TOKENS = 2**17  # of prompts that a cascading cache takes side by side

Parts = list[tuple[list[Sample], Decoder]]


@dataclass(frozen=True)
class Arm:
    """What is measured beside other arms on the same prompts.

    Attributes:
        policy: What a cell says that it attends to.
        right: Counts the exact replies to the samples of a cell, prefilled densely.
    """

    policy: dict[str, Any]
    right: Callable[[Parts], int]


def selecting(study: Study, config: SparseConfig, length: int) -> Arm:
    """Decoding as ``config`` says; heads that stream see their window (LServe, 3.3)."""
    if not isinstance(config.heads, StreamingHeads):
        return _all_heads(study, policy_at(config, length))
    policy = selecting_policy(config)
    device = next(study.model.parameters()).device
    cut, window = streaming_heads(config, study.model.config.kv_heads).to(device), window_of(config)

    def right(parts: Parts) -> int:
        for _, decoder in parts:
            decoder.window = window
        return study.exact(parts, policy, cut)

    heads = config.heads.model_dump(mode="json", include={"kind", "sink", "local", "streaming"})
    return Arm(asdict(policy) | {"heads": heads}, right)


def _all_heads(study: Study, policy: Policy) -> Arm:
    return Arm(asdict(policy), lambda parts: study.exact(parts, policy))


def cascading(study: Study, config: SparseConfig) -> Arm:
    """Prompts and replies over a cascading cache, some side by side (Cascading KV Cache, 3.2)."""
    retention: Any = config.retention
    slots = min(SLOTS, study.count)
    cache = CascadeDecoder(study.model, retention.shape(), retention.average(), slots=slots)

    def right(parts: Parts) -> int:
        found = 0
        for samples, decoder in parts:
            rows = min(slots, max(1, FED_TOKENS // samples[0].length))
            for start in range(0, len(samples), rows):
                some = samples[start : start + rows]
                said = cache.replies([s.prompt_ids for s in some], decoder.room, study.end)
                replies = map(study.encoder.decode, said)
                found += sum(map(is_exact, some, replies))
        return found

    return Arm(retention.model_dump(mode="json"), right)


def measure(study: Study, arms: dict[str, Arm], task: str, length: int) -> list[float]:
    """Share of exact replies of each arm over the same prompts; cells go into ``study.result``."""
    parts = study.prepare(task, length)
    cells = [
        study.record(task, length, parts, arm.policy, arm.right(parts), preset=name)
        for name, arm in arms.items()
    ]
    return [cell["exact"] for cell in cells]


def main() -> None:
    """Run the study, write its cells, and print the table."""
    p = preset_study_parser(__doc__, PRESETS)
    p.add_argument("--count", type=int, default=60, help="samples a cell")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--lengths", type=int, nargs="+", default=[4096])
    p.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    study = Study(
        load(args.model).to(device).eval(), FileEncoder(args.model), args.count, args.seed
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    study.out = args.out
    configs = {name: load_preset(MODEL, name) for name in args.presets}
    bounded = {n: cascading(study, c) for n, c in configs.items() if c.retention.bounded}
    for length in args.lengths:
        arms = {"dense": _all_heads(study, Policy())} | {
            name: bounded.get(name) or selecting(study, config, length)
            for name, config in configs.items()
        }
        for task in args.tasks:
            study.say(task=task, length=length, exact=measure(study, arms, task, length))
    show_table(preset_table(study.result["cells"]) + "\n", args.table)


if __name__ == "__main__":
    main()
