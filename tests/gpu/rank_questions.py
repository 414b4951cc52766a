# SPDX-License-Identifier: Apache-2.0
"""Writes questions to the reference model, for `loadtest/tensor_parallel.py --prompts FILE`.

python tests/gpu/rank_questions.py FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sglang_sparse.tasks import FileEncoder, TaskSuite

MODEL = Path(__file__).parents[2] / "configs" / "reference" / "model"
TASKS = ("multi_key", "multi_value", "multi_query", "variable_tracking")


def questions(count: int, length: int) -> list[tuple[list[int], int]]:
    """Token ids of prompts with words that the model was not trained on, and of how long answers.

    Behind the answer the model says anything.
    """
    suite = TaskSuite(FileEncoder(MODEL), split="heldout")
    each = [suite.samples(task, length, -(-count // len(TASKS))) for task in TASKS]
    samples = [sample for some in zip(*each, strict=True) for sample in some][:count]
    return [(sample.prompt_ids, len(sample.answer_ids)) for sample in samples]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(questions(40, 3000)))
