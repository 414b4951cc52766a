# SPDX-License-Identifier: Apache-2.0
"""Where a worker of draft models takes its slots on a CPU."""

import pytest

from sglang_sparse import compat
from sglang_sparse.compat.cpu_speculation import draft_slots
from sglang_sparse.devices import is_plain_cpu


def never(*args: object, **kwargs: object) -> None:
    """A function that reads no name."""


@pytest.mark.skipif(not is_plain_cpu(), reason="SGLang has its own kernels here")
def test_a_worker_of_draft_models_finds_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative import eagle_worker_common as common

    monkeypatch.setattr(common, "_is_cpu", common._is_cpu)
    compat.current().prepare_draft_worker()
    assert common._is_cpu
    assert common.assign_draft_cache_locs_contiguous_cpu is draft_slots
    # Nothing else there asks whether it is SGLang's own CPU engine.
    assert common.prepare_for_draft.__code__.co_names.count("_is_cpu") == 1
    others = [f for f in vars(common).values() if getattr(f, "__module__", "") == common.__name__]
    asking = [
        f.__name__ for f in others if "_is_cpu" in getattr(f, "__code__", never.__code__).co_names
    ]
    assert asking == ["prepare_for_draft"]
