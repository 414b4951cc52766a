# SPDX-License-Identifier: Apache-2.0
"""Variable tracking: follow a chain of assignments over two to four hops."""

import itertools

import numpy as np

from sglang_sparse.tasks.needles import depths, pick
from sglang_sparse.tasks.sample import Needle, Problem, Question
from sglang_sparse.tasks.words import Split, values, variable_names

HOPS = (2, 3, 4)
CHAINS = 2


def variable_tracking(
    rng: np.random.Generator, split: Split, length: int, hops: int | None = None
) -> Problem:
    """Two chains, one asked for; the reply names each hop, so every hop is scored by what follows.

    A chain of ``hops`` hops has ``hops`` variables: all but the last equal another variable, and
    the last equals a number. The statements stand in random order in the context.

    Raises:
        ValueError: ``hops`` is not 2, 3 or 4.
    """
    if hops is None:
        hops = int(rng.choice(HOPS))
    if hops not in HOPS:
        raise ValueError(f"hops must be one of {HOPS}, got {hops}")
    names, numbers = (
        pick(rng, variable_names(split), CHAINS * hops),
        pick(rng, values(split), CHAINS),
    )
    statements: list[str] = []
    questions: list[Question] = []
    for chain in range(CHAINS):
        own = names[chain * hops : (chain + 1) * hops]
        steps = [f"Variable {a} equals {b}." for a, b in itertools.pairwise(own)]
        steps.append(f"Variable {own[-1]} equals {numbers[chain]}.")
        statements += steps
        questions.append(
            Question(
                "variable_tracking",
                f"What does variable {own[0]} equal in the end?",
                " ".join(steps),
                (numbers[chain],),
            )
        )
    places = depths(rng, len(statements))
    needles = tuple(Needle(s, d) for s, d in zip(statements, places, strict=True))
    return Problem(needles, tuple(questions))
