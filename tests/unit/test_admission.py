# SPDX-License-Identifier: Apache-2.0
"""Prompts that SGLang would accept and never run are too long."""

from types import SimpleNamespace

import pytest

from sglang_sparse import admission

PAGE, POOL = 64, 8192


@pytest.mark.parametrize(
    ("launch", "context", "most"),
    [
        (object(), POOL, POOL - PAGE),
        (object(), POOL - PAGE + 6, POOL - PAGE),
        (object(), POOL - PAGE + 5, POOL - PAGE - 1),  # the context is less than what fits
        (None, POOL, POOL - 6),  # a dense server's own limit
    ],
)
def test_a_prompt_leaves_a_page_of_the_pool(
    monkeypatch: pytest.MonkeyPatch, launch: object, context: int, most: int
) -> None:
    monkeypatch.setattr(admission, "launch_of", lambda _: launch)
    longest = min(context, POOL) - 1
    info = (POOL, "prefill", "running", "queued", longest, longest - 5, "seed", "device")
    worker = SimpleNamespace(server_args=SimpleNamespace(page_size=PAGE))
    got = admission.limit_prompts(lambda _: info, worker)
    assert got == (*info[:5], most, *info[6:])
