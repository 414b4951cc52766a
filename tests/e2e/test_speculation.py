# SPDX-License-Identifier: Apache-2.0
"""Chains of draft tokens: what is answered, what planes hold, and what a next turn takes over."""

from __future__ import annotations

import urllib.error
from collections.abc import Callable
from typing import Any

import pytest
from live_server import KERNEL_ERROR, LiveServer, token_ids
from machine import HAS_GPU

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

Server = Callable[[str], LiveServer]
NGRAMS = ("page_minmax-chains", "sparcas-chains")
DRAFT_MODEL = "sparcas-drafted"
PLAIN = {
    "page_minmax-chains": "page_minmax",
    "sparcas-chains": "sparcas",
    "sparcas-drafted": "sparcas",
}
TOKENS = 24
DRAFTS = 4
PAGE = {"page_minmax-chains": 64, "sparcas-chains": 32, "sparcas-drafted": 32}
EVERYTHING = {"custom_params": {"sparse": {"budget": 32768}}}
DENSE = {"custom_params": {"sparse": {"mode": "dense"}}}


def cut(prompts: list[list[int]]) -> list[list[int]]:
    """Eight prompts on both sides of the 512 tokens from which rows of one server are sparse."""
    return [prompt[: 500 + 30 * i] for i, prompt in enumerate(prompts[:8])]


def ask(live: LiveServer, prompts: list[list[int]], **asked: Any) -> list[dict[str, Any]]:
    return live.generate(prompts, TOKENS, ignore_eos=True, **asked)


def accepted_drafts(answers: list[dict[str, Any]]) -> list[int]:
    """How often 0, 1, ... of the drafts of a verification were accepted."""
    accepted = [0] * DRAFTS
    for answer in answers:
        for count, times in enumerate(answer["meta_info"]["spec_correct_drafts_histogram"]):
            accepted[count] += times
    return accepted


@pytest.fixture(scope="module")
def dense_answers(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    """What the dense server says to each prompt, without speculation."""
    return [token_ids(ask(server("dense"), [prompt]))[0] for prompt in cut(prompts)]


@pytest.fixture(scope="module")
def hundred(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts on both sides of the 64 tokens from which rows are sparse."""
    return [prompts[i % 20][7 * i :][: 40 + 2 * i] for i in range(100)]


@pytest.fixture(scope="module")
def dense_hundred(server: Server, hundred: list[list[int]]) -> list[list[int]]:
    """What the dense server says to each of them, without speculation."""
    return token_ids(server("dense").generate(hundred, 12, ignore_eos=True))


@pytest.mark.parametrize("name", NGRAMS)
@pytest.mark.parametrize("asked", [EVERYTHING, DENSE], ids=["everything", "dense"])
def test_a_full_budget_and_dense_requests_give_the_dense_answers(
    server: Server, prompts: list[list[int]], dense_answers: list[list[int]], name: str, asked: Any
) -> None:
    live = server(name)
    live.flush()
    before = live.sparse_state()["decode_steps"]["sparse"]
    alone = [ask(live, [prompt], **asked)[0] for prompt in cut(prompts)[::2]]
    assert token_ids(alone) == dense_answers[::2]
    together = ask(live, cut(prompts), **asked)
    assert token_ids(together) == dense_answers
    sparse = live.sparse_state()["decode_steps"]["sparse"] - before
    verified = sum(answer["meta_info"]["spec_verify_ct"] for answer in alone)
    assert sparse >= verified // 2 if asked is EVERYTHING else sparse == 0
    # The equality means nothing unless drafts were accepted, and others rejected.
    accepted = accepted_drafts([*alone, *together])
    assert all(accepted), accepted


def test_a_hundred_answers_with_a_draft_model_are_the_dense_ones(
    server: Server, hundred: list[list[int]], dense_hundred: list[list[int]]
) -> None:
    live = server(DRAFT_MODEL)
    live.flush()
    before = live.sparse_state()["decode_steps"]["sparse"]
    answers = live.generate(hundred, 12, ignore_eos=True, **EVERYTHING)
    assert token_ids(answers) == dense_hundred
    accepted, verified = accepted_drafts(answers), live.sparse_state()["decode_steps"]["sparse"]
    assert verified > before
    assert all(accepted), accepted
    # The draft is the model itself: where it attends wrongly, few of its tokens are accepted.
    assert sum(n * times for n, times in enumerate(accepted, 1)) > 3 * sum(accepted), accepted


def test_a_hundred_answers_with_ngrams_are_the_dense_ones(
    server: Server, hundred: list[list[int]], dense_hundred: list[list[int]]
) -> None:
    live = server("sparcas-chains")
    live.flush()
    before = live.sparse_state()["decode_steps"]["sparse"]
    answers = live.generate(hundred, 12, ignore_eos=True, **EVERYTHING)
    assert token_ids(answers) == dense_hundred
    assert live.sparse_state()["decode_steps"]["sparse"] > before
    accepted = accepted_drafts(answers)
    assert all(accepted), accepted


def test_two_ranks_draft_and_verify_as_one_does(
    server: Server,
    prompts: list[list[int]],
    hundred: list[list[int]],
    dense_hundred: list[list[int]],
) -> None:
    asked, page = cut(prompts)[1::3], PAGE["sparcas-chains"]
    found = []
    for name in ("sparcas-chains", "sparcas-chains-ranks"):
        live = server(name)
        live.flush()  # and what n-grams are drafted from
        # Alone: a batch is drafted from what others in it said before.
        found.append([live.generate([p], 3 * page, ignore_eos=True)[0] for p in asked])
    one, two = found
    assert token_ids(two) == token_ids(one)
    accepted = accepted_drafts(two)
    assert accepted == accepted_drafts(one)
    assert all(accepted), accepted
    first, second = live.sparse_state()["ranks"]
    assert first["decode_steps"] == second["decode_steps"]
    assert first["decode_steps"]["sparse"] > 0
    for rank in (first, second):
        # Documents of their own, and of each answer at least two pages.
        assert rank["plane_check"]["pages"] >= sum(len(p) // page + 2 for p in asked)
        assert rank["plane_check"]["wrong"] == 0
    full = live.generate(hundred[::5], 12, ignore_eos=True, **EVERYTHING)
    assert token_ids(full) == dense_hundred[::5]


@pytest.mark.parametrize("name", PLAIN)
def test_planes_are_exact_after_rejected_drafts(
    server: Server, prompts: list[list[int]], name: str
) -> None:
    live = server(name)
    live.flush()
    # Answers that fill whole pages, of requests that share a prefix and some that do not.
    body = [*cut(prompts)[1::4], cut(prompts)[3][:300] + prompts[9][:200]]
    live.generate(body, 1)
    before = live.sparse_state()["plane_check"]["pages"]
    live.generate(body, 3 * PAGE[name], ignore_eos=True)
    checked = live.sparse_state()["plane_check"]
    assert checked["wrong"] == 0
    # Each answer fills at least two pages of its own.
    assert checked["pages"] >= before + 2 * len(body)


def test_verified_drafts_attend_to_one_list(server: Server, prompts: list[list[int]]) -> None:
    live = server("page_minmax-chains")
    ask(live, cut(prompts))
    layers = live.sparse_state()["fidelity"]
    assert len(layers) == 5
    for layer in layers.values():
        assert layer["kernel_error"] <= KERNEL_ERROR
        assert 0.5 < layer["mass"] < 1.0
    assert live.sparse_state()["step_tokens"] == DRAFTS
    assert "4 tokens verified a step on lists that they select together" in live.log.read_text()


@pytest.mark.parametrize("name", PLAIN)
def test_the_first_two_tokens_are_those_of_plain_sparse_decoding(
    server: Server, prompts: list[list[int]], name: str
) -> None:
    # The prefill gives the first token; the second is the first query of a verification, whose list
    # serves the drafts, too.
    plain = server(PLAIN[name])
    live, found = server(name), []
    for one in (plain, live):
        one.flush()
        asked = prompts[:4]
        found.append([token_ids(one.generate([p], 2, ignore_eos=True))[0] for p in asked])
    assert found[0] == found[1]


def test_a_dense_turn_takes_over_dense_kv_alone(server: Server, prompts: list[list[int]]) -> None:
    live = server("page_minmax-chains")
    live.flush()
    page = PAGE["page_minmax-chains"]
    for length, sparse_from in ((600, 600), (430, 511)):
        prompt = prompts[length % 7][:length]
        (answer,) = token_ids(live.generate([prompt], 2 * page + 20, ignore_eos=True))
        turn = [*prompt, *answer, 5, 6, 7]
        cached = live.generate([turn], 1, **DENSE)[0]["meta_info"]["cached_tokens"]
        # What was verified before rows are sparse saw dense attention alone.
        assert cached == min(sparse_from, length + len(answer) - 1) // page * page
        again = live.generate([turn], 1)[0]["meta_info"]["cached_tokens"]
        # The last token's own KV is there if it was a draft.
        assert again - (length + len(answer) - 1) // page * page in (0, page)


@pytest.mark.skipif(HAS_GPU, reason="sampling among drafts takes a GPU")
def test_a_request_that_would_sample_is_refused_on_a_cpu(server: Server) -> None:
    live = server("sparcas-chains")
    for sampling in ({}, {"temperature": 0.7}):
        for stream in (False, True):
            body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "stream": stream}
            with pytest.raises(urllib.error.HTTPError) as refused:
                live.call("/generate", body)
            assert refused.value.code == 400
            assert "temperature" in refused.value.read().decode()
    assert live.generate([[5, 6, 7]], 3, temperature=0.7, top_k=1)


def test_a_hundred_answers_with_eagle_are_the_dense_ones(
    server: Server, hundred: list[list[int]], dense_hundred: list[list[int]]
) -> None:
    live = server("sparcas-eagle")
    before = live.sparse_state()["decode_steps"]["sparse"]
    answers = live.generate(hundred, 12, ignore_eos=True, **EVERYTHING)
    assert token_ids(answers) == dense_hundred
    assert live.sparse_state()["decode_steps"]["sparse"] > before
    accepted = accepted_drafts(answers)
    assert all(accepted), accepted


def test_turns_with_eagle_share_pairs_of_tokens_of_their_own_kind(
    server: Server, prompts: list[list[int]]
) -> None:
    live, page = server("sparcas-eagle"), 32
    live.flush()
    before = live.sparse_state()["plane_check"]["pages"]
    for prompt in (prompts[3][:430], prompts[8][: 14 * page]):
        (answer,) = token_ids(live.generate([prompt], 2 * page + 20, ignore_eos=True))
        # With the KV of a pair, but not of the last token, unless that was a draft.
        pairs = len(prompt) + len(answer) - 2
        turn = [*prompt, *answer, 5, 6, 7]
        cached = live.generate([turn], 1, **DENSE)[0]["meta_info"]["cached_tokens"]
        assert cached == len(prompt) // page * page
        again = live.generate([turn], 1)[0]["meta_info"]["cached_tokens"]
        assert again - pairs // page * page in (0, page)
        # The last page of the prompt is followed by another token, so it is another page.
        other = [*prompt[: 10 * page], (prompt[10 * page] + 1) % 100 + 7, 8, 9]
        assert live.generate([other], 1)[0]["meta_info"]["cached_tokens"] == 9 * page
    checked = live.sparse_state()["plane_check"]
    assert checked["wrong"] == 0
    assert checked["pages"] >= before + 4


def test_answers_with_eagle3_are_the_dense_ones(server: Server, hundred: list[list[int]]) -> None:
    # The draft model guesses that the last token is repeated.
    repeating = [[*prompt[: 9 + i], *[prompt[20]] * 60] for i, prompt in enumerate(hundred[::9])]
    dense = token_ids(server("dense").generate(repeating, 12, ignore_eos=True))
    live = server("page_minmax-eagle3")
    answers = live.generate(repeating, 12, ignore_eos=True, **EVERYTHING)
    assert token_ids(answers) == dense
    state = live.sparse_state()
    assert state["decode_steps"]["sparse"]
    assert state["plane_check"]["wrong"] == 0
    accepted = accepted_drafts(answers)
    assert accepted[0], "no draft was rejected"
    assert accepted[1:] != [0, 0, 0], "no draft was accepted"
