# SPDX-License-Identifier: Apache-2.0
"""The training data of the reference model and its order: stages, and batches of text."""

import multiprocessing
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sglang_sparse.research import mix
from sglang_sparse.research.symbols import SymbolTask


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum, of ``symbols`` or ``text``.

    It ends at ``target`` accuracy, or when the share ``until`` of the time of training is over.
    """

    kind: str
    length: int
    target: float
    tokens: int
    until: float
    symbols: SymbolTask = field(default_factory=SymbolTask)


def curriculum(vocab: int, text_tokens: int) -> list[Stage]:
    """The stages for a vocabulary of ``vocab`` tokens and text steps of ``text_tokens`` tokens."""
    wide = SymbolTask(vocab=vocab - 6, value_vocab=vocab - 6)
    digits = SymbolTask(vocab=vocab - 6, value_vocab=10, key_length=3, value_length=5)
    few = SymbolTask()
    stages = [
        Stage("symbols", n, 0.95, tokens, until, few)
        for n, tokens, until in (
            (64, 4096, 0.02),
            (96, 4096, 0.03),
            (160, 4096, 0.035),
            (256, 8192, 0.045),
            (512, 8192, 0.05),
        )
    ]
    stages += [
        Stage("symbols", 256, 0.95, 16384, 0.06, wide),
        Stage("symbols", 512, 0.95, 16384, 0.08, digits),
    ]
    stages += [
        Stage("text", n, target, text_tokens, until, wide)
        for n, target, until in (
            (256, 0.93, 0.15),
            (512, 0.93, 0.21),
            (1024, 0.93, 0.29),
            (2048, 0.95, 0.38),
            (4096, 0.95, 0.48),
            (8192, 0.95, 0.58),
        )
    ]
    stages.append(Stage("text", 16384, 2.0, text_tokens, 1.0, wide))
    return stages


FINAL_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
FINAL_WEIGHTS = (0.05, 0.10, 0.18, 0.26, 0.22, 0.15, 0.04)


class TextFeed:
    """Batches made by worker processes, a few ahead of the trainer."""

    def __init__(self, source: mix.RowSource, workers: int) -> None:
        self.workers = workers
        self.source = source
        if workers:
            mix.init_worker(source)
        self.pool = (
            multiprocessing.get_context("fork").Pool(workers, mix.single_threaded)
            if workers
            else None
        )
        self.queue: deque[tuple[tuple[int, int, int], Any]] = deque()

    def get(self, jobs: Iterator[tuple[int, int, int]]) -> tuple[tuple[int, int, int], mix.Batch]:
        """The oldest batch in the queue; ``jobs`` keeps the queue full."""
        if self.pool is None:
            mix.init_worker(self.source)
            job = next(jobs)
            return job, mix.worker_batch(job)
        while len(self.queue) < 2 * self.workers:
            job = next(jobs)
            self.queue.append((job, self.pool.apply_async(mix.worker_batch, (job,))))
        job, result = self.queue.popleft()
        return job, result.get(timeout=120)

    def close(self) -> None:
        """End the worker processes."""
        if self.pool is not None:
            self.pool.terminate()
            self.pool.join()
