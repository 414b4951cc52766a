# SPDX-License-Identifier: Apache-2.0
"""Kernels of a server are compiled side by side, before its first batch needs them."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

import torch

from sglang_sparse.backend.decode import DecodeSteps
from sglang_sparse.backend.extend import ExtendSteps
from sglang_sparse.choices.build import Build

if TYPE_CHECKING:
    from sglang_sparse_kernels.records import Softmax

logger = logging.getLogger(__name__)

# Kernels differ by the number of rows where few rows fill no GPU.
_MOST_ROWS = 128
# Each holds PyTorch and Triton, some 0.4 GB, for as long as it compiles.
_MOST_PROCESSES = 16
_SECONDS_BETWEEN_LINES = 5.0


def compile_kernels(
    decode: DecodeSteps,
    extend: ExtendSteps,
    build: Build,
    softmax: Softmax,
    *,
    dtype: torch.dtype,
    chunk: int,
    rank: int,
    ranks: int,
) -> None:
    """Compile what batches will launch and Triton's cache on disk lacks.

    Ranks of one host launch the same kernels and share its cores and its cache, so each begins with
    other kernels than the others.

    Args:
        decode, extend: what launches it.
        build: the server's buffers; kernels of the `impl` that is no Triton are not compiled.
        softmax: as layers have it.
        dtype: of queries.
        chunk: most tokens of a prompt in one batch.
        rank: which of the ``ranks`` of this host this is.
    """
    if build.impl != "triton":
        return
    from sglang_sparse_kernels.ahead import compile_ahead, watch_launches

    start = told = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal told
        if done == 0 or time.monotonic() - told > _SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            logger.info("sglang-sparse: compiled %d of %d kernels", done, of)

    result = compile_ahead(
        lambda: rehearse(decode, extend, build, softmax, dtype=dtype, chunk=chunk),
        processes=max(1, min(len(os.sched_getaffinity(0)) // ranks, _MOST_PROCESSES)),
        begin=rank / ranks,
        progress=progress,
    )
    logger.info(
        "sglang-sparse: %d kernels were on disk, %d were compiled by %d processes, in %.1f s",
        result.found,
        result.compiled,
        result.processes,
        time.monotonic() - start,
    )
    for failure in result.failures:
        logger.warning("sglang-sparse: left for its first launch: %s", failure)
    watch_launches(_say_late)


def _say_late(name: str, seconds: float) -> None:
    logger.warning(
        "sglang-sparse: %s was compiled at its launch, which took %.1f s: it is not among the "
        "kernels that are compiled ahead",
        name,
        seconds,
    )


def rehearse(
    decode: DecodeSteps,
    extend: ExtendSteps,
    build: Build,
    softmax: Softmax,
    *,
    dtype: torch.dtype,
    chunk: int,
) -> None:
    """Launch, in a rehearsal, what batches launch; see :func:`compile_kernels`."""
    rows, most = 1, min(build.columns.request_slots, _MOST_ROWS)
    queries, dim = build.limits.queries, build.pool.head_dim
    while rows <= most:
        shape = (rows * queries, build.query_heads, dim)
        decode.rehearse(rows, torch.zeros(shape, dtype=dtype, device=build.device), softmax)
        rows *= 2
    extend.rehearse(chunk, softmax)
