# SPDX-License-Identifier: Apache-2.0
"""Streaming heads that hold windows only, over HTTP, beside the same heads that hold everything."""

import urllib.error
from collections.abc import Callable

import pytest
from live_server import LiveServer, logprobs, token_ids
from streaming_heads import CHUNK, STREAMING, WINDOW_TOKENS

from sglang_sparse.window_pools import tokens_of_one_request

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

Server = Callable[[str], LiveServer]
TOKENS = 8
KEPT, GIVEN_BACK = "windows-kept", "windows-given-back"
RETRACTION = "KV cache pool is full. Retract"


def schedule(prompts: list[list[int]]) -> list[list[list[int]]]:
    """Batches of prompts: short, repeated, branching in a prefix whose windows were given back."""
    one, two, three = prompts[4][:3000], prompts[9][:1500], prompts[14][:1500]
    branches = [one[:length] + two[:20] for length in (40, 130, 700, 1900)]
    return [
        *([one[:40]], [one[:1200]], [one[:1200] + two[:3]], [one], [two, three], [one]),
        *([branch] for branch in branches),
        branches,
    ]


def test_answers_are_those_of_heads_that_hold_everything(
    server: Server, prompts: list[list[int]]
) -> None:
    answers = {}
    for name in (KEPT, GIVEN_BACK):
        live = server(name)
        live.flush()
        answers[name] = [
            answer
            for batch in schedule(prompts)
            for answer in live.generate(batch, TOKENS, ignore_eos=True)
        ]
    kept, given_back = answers[KEPT], answers[GIVEN_BACK]
    assert token_ids(given_back) == token_ids(kept)
    change = [abs(a - b) for a, b in zip(logprobs(kept), logprobs(given_back), strict=True)]
    assert max(change) <= 1e-3
    found = [
        [answer["meta_info"]["cached_tokens"] for answer in those] for those in (kept, given_back)
    ]
    # Prefixes are shared, though shorter ones where a window is gone.
    assert sum(found[0]) > sum(found[1]) > 0
    state = server(GIVEN_BACK).sparse_state()
    assert state["decode_steps"]["sparse"] > 0
    assert state["plane_check"]["wrong"] == 0
    assert state["plane_check"]["pages"] > 0


def test_memory_holds_the_windows_of_streaming_heads_and_is_counted(server: Server) -> None:
    kept, given_back = (server(name).sparse_state()["kv_bytes"] for name in (KEPT, GIVEN_BACK))
    # Two of four heads stream. Each pool has a page of padding beside its tokens.
    pages, windows, half = 8192 // 64, WINDOW_TOKENS // 64, kept / (8192 // 64 + 1) / 2
    assert given_back == pytest.approx(half * (pages + windows + 2), rel=1e-6)
    assert server(GIVEN_BACK).call("/server_info")["max_total_num_tokens"] == 8192


def test_a_long_request_ends_where_only_one_has_room(
    server: Server, prompts: list[list[int]]
) -> None:
    window = (STREAMING["sink"], STREAMING["local"])
    assert tokens_of_one_request(window, 64, CHUNK) == WINDOW_TOKENS
    live = server(GIVEN_BACK)
    live.flush()
    long = [*prompts[4], *prompts[9], *prompts[14]][:5000]
    # Lengths at which what is locked ends anywhere in a window; decoding leaves it behind.
    for end in (5000, 4600, 4650, 4990):
        [answer] = live.generate([long[:end]], 160, ignore_eos=True)
        assert answer["meta_info"]["completion_tokens"] == 160


def test_requests_that_are_retracted_answer_as_those_that_hold_everything(
    server: Server, prompts: list[list[int]]
) -> None:
    # Some begin. As they decode, their windows outgrow the pool of the server that holds no more.
    lengths = ((2, 130), (7, 90), (12, 110), (4, 120), (9, 100), (14, 70))
    batch = [prompts[i][:length] for i, length in lengths]
    # A retracted request computes what it decoded anew, as a prompt. With a budget of the whole
    # context that gives the same KV, so answers do not depend on who was retracted.
    everything = {"custom_params": {"sparse": {"budget": 32768}}}
    answers, retracted = {}, {}
    for name in (KEPT, GIVEN_BACK):
        live = server(name)
        live.flush()
        before = live.log.read_text().count(RETRACTION)
        answers[name] = live.generate(batch, 240, ignore_eos=True, **everything)
        retracted[name] = live.log.read_text().count(RETRACTION) - before
    assert retracted[GIVEN_BACK] > 0 == retracted[KEPT]
    assert token_ids(answers[GIVEN_BACK]) == token_ids(answers[KEPT])
    change = zip(logprobs(answers[KEPT]), logprobs(answers[GIVEN_BACK]), strict=True)
    assert max(abs(a - b) for a, b in change) <= 1e-3
    # Retraction and computing anew lose no slot: SGLang checks its memory where it is idle.
    assert server(GIVEN_BACK).sparse_state()["plane_check"]["wrong"] == 0
    server(GIVEN_BACK).flush()
    assert server(GIVEN_BACK).is_alive()


def test_a_request_for_dense_gets_a_400(server: Server, prompts: list[list[int]]) -> None:
    live = server(GIVEN_BACK)
    with pytest.raises(urllib.error.HTTPError) as refused:
        live.generate([prompts[0][:50]], 1, custom_params={"sparse": {"mode": "dense"}})
    assert refused.value.code == 400
    assert "holds only sinks and windows" in refused.value.read().decode()
