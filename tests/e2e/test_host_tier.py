# SPDX-License-Identifier: Apache-2.0
"""KV in host memory: evicted prompts come back whole, with their planes, on their branch."""

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import scripts  # noqa: F401  isort: skip  # makes the load tests importable
from evicted_latency import measure
from host_tier import METHODS
from live_server import LiveServer, logprobs, token_ids

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

Server = Callable[[str], LiveServer]
PAGE = 64
LENGTH = 1300  # three of these and two pages each overfill the pool
TOKENS = PAGE + 8  # a page and more is decoded
COMPARED = 16  # of answers that no turn goes on with
DENSE = {"custom_params": {"sparse": {"mode": "dense"}}}
Answer = tuple[list[int], list[float]]


def ask(
    live: LiveServer, prompt: list[int], tokens: int = COMPARED, **body: Any
) -> tuple[Answer, dict[str, int]]:
    """Greedy answer with its log-probabilities, and where its prefix was: device and host."""
    answers = live.generate([prompt], tokens, ignore_eos=True, **body)
    found = answers[0]["meta_info"]["cached_tokens_details"] or {"device": 0, "host": 0}
    return (token_ids(answers)[0], logprobs(answers)), found


def evict(live: LiveServer, prompts: list[list[int]]) -> None:
    """Ask so much else that nothing of what was there stays on the device."""
    for prompt in prompts:
        ask(live, [*prompt, *prompt[: 2 * PAGE]], 1)


def documents(prompts: list[list[int]]) -> list[list[int]]:
    """Eight prompts that begin differently."""
    found = [prompt[:LENGTH] for prompt in prompts if len(prompt) >= LENGTH][:4]
    return [*found, *([7 + i, *prompt[1:]] for i, prompt in enumerate(found))]


@pytest.mark.parametrize("method", [*METHODS, "ranks"])
def test_an_evicted_prompt_answers_as_one_that_stayed(
    server: Server, prompts: list[list[int]], method: str
) -> None:
    live = server(f"host-{method}")
    live.flush()
    first, *others = documents(prompts)[:4]
    cold, found = ask(live, first, TOKENS)
    assert found == {"device": 0, "host": 0}
    whole = (LENGTH - 1) // PAGE * PAGE
    stayed, found = ask(live, first)
    assert found == {"device": whole, "host": 0}
    # The next turn goes on with what was decoded, on the request's own branch.
    turn = [*first, *cold[0], *others[0][:20]]
    ask(live, turn, 1)
    turn_stayed, found = ask(live, turn)
    decoded = (len(turn) - 1) // PAGE * PAGE
    assert found == {"device": decoded, "host": 0}

    evict(live, others)
    before = live.sparse_state()["plane_reuse"]
    turn_back, found = ask(live, turn)
    assert found == {"device": 0, "host": decoded}
    assert turn_back == turn_stayed
    evict(live, others)
    back, found = ask(live, first)
    assert found == {"device": 0, "host": whole}
    assert back == stayed
    state = live.sparse_state()
    recomputed = state["plane_reuse"]["recomputed_pages"] - before["recomputed_pages"]
    assert recomputed >= (decoded + whole) // PAGE
    assert state["plane_check"]["wrong"] == 0
    assert state["plane_check"]["pages"] > whole // PAGE


def test_a_dense_request_takes_dense_kv_alone_from_the_host(
    server: Server, prompts: list[list[int]]
) -> None:
    live = server("host-sparcas")
    live.flush()
    first, *others = documents(prompts)[:4]
    (answer, _), _ = ask(live, first, TOKENS)
    evict(live, others)
    turn = [*first, *answer, *others[0][:20]]
    _, found = ask(live, turn, **DENSE)
    assert found == {"device": 0, "host": LENGTH // PAGE * PAGE}
    # The branch is still there: what the sparse request decoded serves the next sparse one.
    evict(live, others)
    _, found = ask(live, turn)
    assert found["host"] + found["device"] > LENGTH // PAGE * PAGE


def test_a_soak_of_evicted_prompts_answers_as_a_server_that_never_evicts(
    server: Server, prompts: list[list[int]]
) -> None:
    small, roomy = server("host-page_minmax"), server("roomy-page_minmax")
    small.flush()
    roomy.flush()
    draw = random.Random(5)
    talks = documents(prompts)
    cached: Counter[str] = Counter()
    for _ in range(30):
        index = draw.randrange(len(talks))
        mode = DENSE if draw.random() < 0.25 else {}
        goes_on = len(talks[index]) < 2 * LENGTH and draw.random() < 0.5
        tokens = TOKENS if goes_on else COMPARED
        answer, found = ask(small, talks[index], tokens, **mode)
        expected, there = ask(roomy, talks[index], tokens, **mode)
        assert answer == expected
        assert sum(found.values()) == sum(there.values())
        assert there["host"] == 0
        cached.update(found)
        if goes_on:
            talks[index] = [*talks[index], *answer[0], *talks[index][5:25]]
    assert cached["host"] > cached["device"]
    for live in (small, roomy):
        assert live.sparse_state()["plane_check"]["wrong"] == 0
    metrics = small.metrics()
    recomputed = small.sparse_state()["plane_reuse"]["recomputed_pages"]
    assert metrics["plane_recomputed_pages_total", ""] == recomputed > 0


def test_requests_at_once_leave_planes_and_memory_right(
    server: Server, prompts: list[list[int]]
) -> None:
    live = server("host-page_minmax")
    talks = documents(prompts) * 2
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda talk: live.generate([talk], 16)[0], talks))
    assert all(answer["meta_info"]["completion_tokens"] for answer in answers)
    check = live.sparse_state()["plane_check"]
    assert check["pages"] > 0
    assert check["wrong"] == 0
    # SGLang checks its memory where it is idle, and ends the server if a page was lost.
    live.flush()
    assert live.is_alive()


def test_the_first_token_of_an_evicted_prompt_is_measured_where_it_was_evicted(
    server: Server,
) -> None:
    live = server("host-page_minmax")
    live.flush()
    sizes = {"length": LENGTH, "repeats": 1, "vocab": 300}
    found = measure(live.url, others=3, **sizes)
    cached = [found[tier]["cached_tokens"] for tier in ("new", "device", "host")]
    whole = (LENGTH - 1) // PAGE * PAGE
    assert cached == [0, whole, whole]
    # With nobody to evict it, it is on the device, and the measurement says so.
    with pytest.raises(RuntimeError, match="meant to be"):
        measure(live.url, others=0, **sizes)
