# SPDX-License-Identifier: Apache-2.0
"""A plan waits for the device's copy of the one before, and for nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_sparse.backend.inner import InnerBackends
from sglang_sparse.backend.plan_copies import PlanCopies


class Log:
    """An event and a backend that note what is done with them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.captures = False

    def record(self) -> None:
        self.calls.append("record")

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.calls.append(f"plan {forward_batch}")

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.calls.append(f"plan {forward_batch} for a graph")


@pytest.fixture
def log() -> Log:
    return Log()


def inner(log: Log, *, on_gpu: bool = True) -> InnerBackends:
    """Inner backends of which only planning is there."""
    made = InnerBackends.__new__(InnerBackends)
    copies = PlanCopies(log if on_gpu else None, lambda: log.captures)
    vars(made).update(variant="sparse", _of={"sparse": log}, _copies=copies, _lengths=None)
    return made


def test_a_plan_waits_until_the_last_one_is_copied(log: Log) -> None:
    backends = inner(log)
    backends.plan(1, graph=True)
    backends.plan(2, graph=False)
    assert log.calls == ["plan 1 for a graph", "record", "synchronize", "plan 2", "record"]


def test_nobody_waits_while_a_graph_is_captured(log: Log) -> None:
    backends = inner(log)
    log.captures = True
    backends.plan(1, graph=True, in_capture=True)
    backends.plan(2, graph=True, in_capture=True)
    assert log.calls == ["plan 1 for a graph", "plan 2 for a graph"]


def test_nobody_waits_on_a_cpu(log: Log) -> None:
    backends = inner(log, on_gpu=False)
    backends.plan(SimpleNamespace(), graph=False)
    backends.plan(SimpleNamespace(), graph=False)
    assert [call.split()[0] for call in log.calls] == ["plan", "plan"]
