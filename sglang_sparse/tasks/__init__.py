# SPDX-License-Identifier: Apache-2.0
"""Long-context tasks with exact scoring: in the style of RULER (arXiv:2404.06654), and reading.

    from sglang_sparse.tasks import FileEncoder, TaskSuite, accuracy

    suite = TaskSuite(FileEncoder("configs/reference/model"), split="heldout")
    samples = suite.samples("multi_key", length=4096, count=200, seed=1)
    replies = [ask(s.messages) for s in samples]  # or s.prompt, or s.prompt_ids
    print(accuracy(samples, replies))

Everything is seeded. Keys, values, variable names and filler documents of the splits are disjoint.
In the reading tasks, so are words, names, sentences and forms of a question.
"""

from sglang_sparse.tasks.encoding import Encoder, FileEncoder, HuggingFaceEncoder
from sglang_sparse.tasks.registry import NEEDLE_TASKS, READING_TASKS, RULER_TASKS, TASKS, TaskSuite
from sglang_sparse.tasks.sample import Needle, Problem, Question, Sample
from sglang_sparse.tasks.scoring import accuracy, extract, is_exact, recall, wilson
from sglang_sparse.tasks.words import SPLITS, Split, in_split

__all__ = [
    "NEEDLE_TASKS",
    "READING_TASKS",
    "RULER_TASKS",
    "SPLITS",
    "TASKS",
    "Encoder",
    "FileEncoder",
    "HuggingFaceEncoder",
    "Needle",
    "Problem",
    "Question",
    "Sample",
    "Split",
    "TaskSuite",
    "accuracy",
    "extract",
    "in_split",
    "is_exact",
    "recall",
    "wilson",
]
