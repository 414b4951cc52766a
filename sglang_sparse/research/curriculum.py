# SPDX-License-Identifier: Apache-2.0
"""The training data of the reference model and its order: stages, and batches of text."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_sparse.research import mix
from sglang_sparse.research.symbols import SymbolTask


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum, of ``symbols`` or ``text``; it ends at ``target`` accuracy."""

    kind: str
    length: int
    target: float
    tokens: int
    symbols: SymbolTask = field(default_factory=SymbolTask)
    seconds: float = 1e9


def curriculum(vocab: int, text_tokens: int) -> list[Stage]:
    """The stages for a vocabulary of ``vocab`` tokens and text steps of ``text_tokens`` tokens."""
    wide = SymbolTask(vocab=vocab - 6, value_vocab=vocab - 6)
    digits = SymbolTask(vocab=vocab - 6, value_vocab=10, key_length=3, value_length=5)
    few = SymbolTask()
    stages = [Stage("symbols", n, 0.95, 4096, few) for n in (64, 96, 160)]
    stages += [Stage("symbols", n, 0.95, 8192, few, 60) for n in (256, 512)]
    stages += [
        Stage("symbols", 256, 0.95, 16384, wide, 45),
        Stage("symbols", 512, 0.95, 16384, digits, 45),
    ]
    stages += [Stage("text", n, 0.93, text_tokens, wide, 150) for n in (256, 512, 1024)]
    stages += [Stage("text", n, 0.95, text_tokens, wide, 150) for n in (2048, 4096, 8192)]
    stages.append(Stage("text", 16384, 2.0, text_tokens, wide))
    return stages


FINAL_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
FINAL_WEIGHTS = (0.06, 0.12, 0.12, 0.27, 0.22, 0.17, 0.04)


class TextFeed:
    """Batches made by worker processes, a few ahead of the trainer."""

    def __init__(self, tokenizer: Path, workers: int, text_share: float) -> None:
        self.workers = workers
        self.source = (str(tokenizer), text_share)
        if workers:
            mix.init_worker(*self.source)
        self.pool = (
            multiprocessing.get_context("fork").Pool(workers, mix.single_threaded)
            if workers
            else None
        )
        self.queue: deque[tuple[tuple[int, int, int], Any]] = deque()

    def get(self, jobs: Iterator[tuple[int, int, int]]) -> tuple[tuple[int, int, int], mix.Batch]:
        """The oldest batch in the queue; ``jobs`` keeps the queue full."""
        if self.pool is None:
            mix.init_worker(*self.source)
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
