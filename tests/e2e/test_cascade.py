# SPDX-License-Identifier: Apache-2.0
"""A real server that holds a bounded number of tokens a request."""

import json
import random
import time
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cascading import SMALL
from live_server import MODEL, LiveServer, token_ids
from server_host import Host

from sglang_sparse import compat
from sglang_sparse.config import load_preset
from sglang_sparse.metrics import PREFIX
from sglang_sparse.research.cascade import CascadeDecoder
from sglang_sparse.research.export import load
from sglang_sparse.tasks import TaskSuite

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

Server = Callable[[str], LiveServer]
PRESET: Any = load_preset("reference", "cascade").retention
RETENTION: Any = PRESET.model_copy(update=SMALL)
shares_states = pytest.mark.skipif(
    not compat.current().SHARES_STATES, reason="refused with this version of SGLang"
)
TOKENS = 8
# Slots of the server; fewer than the requests of some tests.
SLOTS = 8


def greedy(live: LiveServer, prompts: list[list[int]], tokens: int = TOKENS) -> list[list[int]]:
    """Greedy tokens of each prompt, asked alone."""
    return [token_ids(live.generate([p], tokens, ignore_eos=True))[0] for p in prompts]


def passkeys(suite: TaskSuite, *lengths: int) -> list[list[int]]:
    """A prompt of each length."""
    return [suite.samples("passkey", length=n, count=1, seed=n)[0].prompt_ids for n in lengths]


def defined(retention: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What the same model says over the cache's definition, without a server."""
    decoder = CascadeDecoder(load(MODEL), retention.shape(), retention.average())
    return [decoder.reply(prompt, TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def long_prompts(suite: TaskSuite) -> list[list[int]]:
    """Prompts of up to nine times what is held."""
    most = RETENTION.most_tokens
    return passkeys(suite, most + 300, 3 * most + 17, 9 * most)


@pytest.fixture(scope="module")
def expected(long_prompts: list[list[int]]) -> list[list[int]]:
    """What the model says to them."""
    return defined(RETENTION, long_prompts)


def test_a_window_above_the_context_gives_the_dense_answers(
    server: Server, prompts: list[list[int]]
) -> None:
    ids = [*prompts[:SLOTS], prompts[-1]]
    dense = greedy(server("dense"), ids)
    live = server("cascade-whole")
    assert live.sparse_state()["tokens_held"] > max(map(len, ids)) + TOKENS
    assert greedy(live, ids) == dense
    # The same as one batch, which takes any slots and chunks that hold several requests.
    assert token_ids(live.generate(ids, TOKENS, ignore_eos=True)) == dense


def check_beyond_the_window(
    live: LiveServer, asked: list[list[int]], expected: list[list[int]]
) -> None:
    """Prompts of more tokens than are held, alone and in a batch."""
    held = live.sparse_state()["tokens_held"]
    assert held < min(map(len, asked))
    assert greedy(live, asked) == expected
    # Slots that others left, and neighbours in a batch, change nothing.
    assert token_ids(live.generate(asked[::-1], TOKENS, ignore_eos=True)) == expected[::-1]


def test_prompts_far_beyond_the_window_are_answered_as_the_definition_says(
    server: Server, long_prompts: list[list[int]], expected: list[list[int]]
) -> None:
    check_beyond_the_window(server("cascade"), long_prompts, expected)


def test_two_ranks_answer_as_the_definition_says_and_hold_what_their_heads_keep(
    server: Server, long_prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert greedy(server("cascade-ranks"), long_prompts[:2]) == expected[:2]
    whole, ranks = (server(name).sparse_state() for name in ("cascade", "cascade-ranks"))
    assert 2 * ranks["slot_bytes"] == whole["slot_bytes"]
    assert len({rank["kv_bytes"] for rank in ranks["ranks"]}) == 1
    assert len(ranks["ranks"]) == 2


def test_the_preset_as_shipped_answers_as_the_definition_says(
    server: Server, suite: TaskSuite
) -> None:
    most = PRESET.most_tokens
    asked = passkeys(suite, most + 300, 3 * most + 17)
    check_beyond_the_window(server("cascade-chunks"), asked, defined(PRESET, asked))


def test_sglangs_metrics_are_served_and_none_of_selections(server: Server) -> None:
    said = server("cascade-chunks").call("/metrics")
    assert "sglang:num_running_reqs" in said
    assert PREFIX not in said


def test_decoding_closes_strides_as_prompts_do(server: Server, suite: TaskSuite) -> None:
    live = server("cascade")
    prompt = suite.samples("passkey", length=1500, count=1, seed=3)[0].prompt_ids
    stride = RETENTION.shape().stride
    said = greedy(live, [prompt], 2 * stride)[0]
    decoder = CascadeDecoder(load(MODEL), RETENTION.shape(), RETENTION.average())
    assert said == decoder.reply(prompt, 2 * stride)
    # What was decoded, sent as a prompt, leads to the same state.
    again = greedy(live, [prompt + said[: stride + 9]], stride - 9)[0]
    assert again == said[stride + 9 :]


def wait_until_slots_are_free(live: LiveServer) -> None:
    """Return once every slot of the server is free; the last request is put away a step later."""
    for _ in range(50):
        state = live.sparse_state()
        if state["free_slots"] == state["slots"] == SLOTS:
            break
        time.sleep(0.2)
    assert state["free_slots"] == state["slots"] == SLOTS
    assert live.is_alive()
    assert "leak detected" not in live.log.read_text()


def test_memory_is_that_of_slots_whatever_requests_take(
    server: Server, long_prompts: list[list[int]]
) -> None:
    live = server("cascade")
    state = live.sparse_state()
    assert state["slots"] == SLOTS
    assert state["kv_bytes"] == state["slots"] * state["slot_bytes"]
    model = json.loads((MODEL / "config.json").read_text())
    token = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * 4
    longest = max(map(len, long_prompts))
    assert longest * token > state["slot_bytes"] * 8
    each = f"{state['slot_bytes'] / 2**20:.1f} MiB each"
    assert f"{SLOTS} slots of requests and 0 of prefixes, {each}, " in live.log.read_text()


@pytest.mark.parametrize(
    ("asked", "problem"),
    [({"mode": "dense"}, "mode dense: this server holds at most"), ({"budget": 64}, "budget 64")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_was_evicted_cannot_be_asked_for(
    server: Server, asked: dict[str, object], problem: str, stream: bool
) -> None:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 1, "custom_params": {"sparse": asked}},
        "stream": stream,
    }
    with pytest.raises(urllib.error.HTTPError) as refused:
        server("cascade").call("/generate", body)
    assert refused.value.code == 400
    assert problem in refused.value.read().decode()


def test_every_slot_returns_after_aborts(
    server: Server, long_prompts: list[list[int]], expected: list[list[int]]
) -> None:
    live = server("cascade")
    with ThreadPoolExecutor(2 * SLOTS) as pool:
        asked = [
            pool.submit(live.generate, [long_prompts[i % 2]], 2000, ignore_eos=True)
            for i in range(2 * SLOTS)
        ]
        time.sleep(3)
        live.call("/abort_request", {"rid": "", "abort_all": True})
        for answer in asked:
            answer.result()
    batch = [long_prompts[0]] * (SLOTS + 1)
    assert token_ids(live.generate(batch, TOKENS, ignore_eos=True)) == [expected[0]] * (SLOTS + 1)
    wait_until_slots_are_free(live)


def test_more_slots_than_memory_holds_are_refused(tmp_path: Path, forking: Host | None) -> None:
    args = ["--attention-backend", "sparse", "--sparse-method", "cascade", "--disable-radix-cache"]
    many = ["--max-running-requests", "10000000"]
    live = LiveServer([*args, *many], tmp_path / "log", host=forking)
    try:
        live.wait_until_ended()
    finally:
        live.close()
    said = live.log.read_text()
    assert "--max-running-requests 10000000: not supported with --attention-backend sparse" in said
    assert "a state slot takes " in said


def cached_tokens(answer: list[dict[str, Any]]) -> int:
    """Prompt tokens of one answer that were not computed."""
    return int(answer[0]["meta_info"]["cached_tokens"])


@shares_states
def test_a_second_question_to_a_long_document_is_answered_from_a_snapshot(
    server: Server, suite: TaskSuite
) -> None:
    live = server("cascade-prefixes")
    live.flush()
    shape = RETENTION.shape()
    document = suite.samples("passkey", length=5000, count=1, seed=8)[0].prompt_ids
    other = suite.samples("passkey", length=3000, count=1, seed=9)[0].prompt_ids
    questions = [document[:4500] + document[-n:] for n in (40, 90)]
    decoder = CascadeDecoder(load(MODEL), shape, RETENTION.average())
    want = [decoder.reply(prompt, TOKENS) for prompt in questions]

    def ask(prompt: list[int]) -> tuple[list[int], int]:
        answer = live.generate([prompt], TOKENS, ignore_eos=True)
        return token_ids(answer)[0], cached_tokens(answer)

    assert ask(questions[0]) == (want[0], 0)
    # The deepest end of a stride that both have in common, and that a chunk took.
    deepest = shape.full + (4500 - shape.full) // shape.stride * shape.stride
    said, cached = ask(questions[1])
    assert said == want[1]
    assert deepest - 1024 <= cached <= deepest
    assert shape.closes(cached)
    # Chunks leave a snapshot each, and two are kept: those of the other document take their place.
    assert ask(other)[1] == 0
    assert ask(questions[1]) == (want[1], 0)
    state = live.sparse_state()["snapshots"]
    assert state["slots"] == state["kept"] == 2
    assert state["restored"] >= 1


@shares_states
def test_many_questions_at_once_share_a_snapshot_and_need_more_than_a_chunk(
    server: Server, suite: TaskSuite
) -> None:
    live = server("cascade-prefixes")
    live.flush()
    document = suite.samples("passkey", length=3000, count=1, seed=11)[0].prompt_ids
    prompts = [document[:2600] + document[-300 - n :] for n in range(SLOTS)]
    live.generate([document[:2600]], 1)
    answers = live.generate(prompts, TOKENS, ignore_eos=True)
    # Some begin with the document's snapshot, and one of them is cut where the chunk is full.
    shared = [len(p) - cached_tokens([a]) for p, a in zip(prompts, answers, strict=True)]
    assert sum(left < 1024 for left in shared) >= 2
    assert sum(shared) > 1024
    live.flush()
    said = token_ids(answers)
    assert [said[0], said[-1]] == greedy(live, [prompts[0], prompts[-1]])


@shares_states
def test_snapshots_are_forgotten_by_a_flush_and_kept_apart_by_extra_keys(
    server: Server, suite: TaskSuite
) -> None:
    live = server("cascade-prefixes")
    prompt = suite.samples("passkey", length=3000, count=1, seed=10)[0].prompt_ids

    def ask(key: str | None = None) -> int:
        body = {
            "input_ids": [prompt],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "extra_key": key,
        }
        return cached_tokens(live.call("/generate", body))

    live.flush()
    assert [ask(), ask() > 2000] == [0, True]
    assert ask("someone") == 0
    live.flush()
    assert live.sparse_state()["snapshots"]["kept"] == 0
    assert ask() == 0


@shares_states
def test_slots_and_snapshots_return_after_retractions_and_aborts(
    server: Server, suite: TaskSuite
) -> None:
    live = server("cascade-retracts")
    live.flush()
    tokens = 300
    prompts = [
        suite.samples("passkey", length=1400, count=1, seed=20 + i)[0].prompt_ids for i in range(3)
    ]
    cold = []
    for prompt in prompts:
        live.flush()
        cold += token_ids(live.generate([prompt], tokens, ignore_eos=True))
    live.flush()  # a request that begins with a snapshot takes no token slots for it
    assert token_ids(live.generate(prompts, tokens, ignore_eos=True)) == cold
    assert "Retract" in live.log.read_text()
    draws = random.Random(4)

    def ask(number: int) -> None:
        rid = f"soak-{number}"
        body = {
            "input_ids": prompts[number % 3][: draws.randrange(900, 1400)],
            "sampling_params": {"max_new_tokens": 100, "ignore_eos": True},
            "rid": rid,
        }
        with ThreadPoolExecutor(1) as one:
            answer = one.submit(live.call, "/generate", body)
            time.sleep(draws.uniform(0.1, 3))
            if number % 4:
                live.call("/abort_request", {"rid": rid})
            answer.result()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(12)))
    # Every slot is there, and what is cached is what is computed.
    assert token_ids(live.generate(prompts, 8, ignore_eos=True)) == [c[:8] for c in cold]
    again = live.generate([prompts[2]], 8, ignore_eos=True)
    assert token_ids(again) == [cold[2][:8]]
    state = live.sparse_state()["snapshots"]
    assert state["kept"] == state["slots"] == 2
    assert state["restored"] >= 1
    wait_until_slots_are_free(live)
    live.flush()
    assert live.sparse_state()["snapshots"]["kept"] == 0
    assert greedy(live, prompts[:1]) == [cold[0][:TOKENS]]
