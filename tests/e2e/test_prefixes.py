# SPDX-License-Identifier: Apache-2.0
"""What a request takes over from the turns before it: dense KV, or sparse KV of its own kind."""

import urllib.error
from collections.abc import Callable
from math import log, sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from live_server import LiveServer, token_ids
from scipy.stats import t as student

from sglang_sparse_radix.branches import Branch

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

Server = Callable[[str], LiveServer]
Turn = tuple[int, list[float]]
DENSE = {"custom_params": {"sparse": {"mode": "dense"}}}
SPARSE: dict[str, Any] = {}
PAGE = 64
ANSWER = PAGE + 20  # behind 700 tokens it holds a whole page that was decoded
ASKED = 48  # tokens of the next question, whose log-probabilities are compared
CONFIDENCE = 0.99
# Servers, and the tokens that no request of theirs attends to sparsely in a prompt.
DENSE_PROMPT = {"sparcas": 1 << 30, "kascade": 256}


def documents(prompts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Four prompts, and what is asked next about each."""
    return [(prompt[:700], prompt[720 : 720 + ASKED]) for prompt in prompts[:4]]


def whole_pages(tokens: int) -> int:
    return tokens // PAGE * PAGE


def answer(live: LiveServer, prompt: list[int], mode: dict[str, Any]) -> list[int]:
    """The first turn: the prompt and its greedy answer."""
    (found,) = token_ids(live.generate([prompt], ANSWER, ignore_eos=True, **mode))
    return prompt + found


def ask(
    live: LiveServer, conversation: list[int], question: list[int], mode: dict[str, Any], **key: Any
) -> Turn:
    """The next turn: how many tokens were cached, and the log-probability of each one asked."""
    body = {
        "input_ids": conversation + question,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, **mode},
        "return_logprob": True,
        # Log-probabilities from here on, so what lies before may be cached.
        "logprob_start_len": len(conversation),
        **key,
    }
    meta = live.call("/generate", body)["meta_info"]
    # The first one has no token before it that is computed anew.
    asked = [p for p, _, _ in meta["input_token_logprobs"][1:]]
    assert len(asked) == len(question) - 1
    return meta["cached_tokens"], [*asked, meta["output_token_logprobs"][0][0]]


def distance(one: list[float], other: list[float]) -> float:
    """Root mean square difference, at least what one float32 log-probability resolves."""
    first, second = np.asarray(one), np.asarray(other)
    resolved = float(np.spacing(np.abs(first).max().astype(np.float32)))
    return max(float(np.sqrt(np.mean((first - second) ** 2))), resolved)


def assert_no_more_than(noise: list[float], found: list[float]) -> None:
    """The mean of log(found / noise), one pair a document, is not above 0 with confidence.

    Ratios, since noise differs by document; Student's t, since there are few documents.
    """
    ratios = [log(f / n) for f, n in zip(found, noise, strict=True)]
    quantile = student.ppf((1 + CONFIDENCE) / 2, len(ratios) - 1)
    half = float(quantile) * stdev(ratios) / sqrt(len(ratios))
    assert fmean(ratios) - half <= 0, (noise, found)


def noise_of(live: LiveServer, prompts: list[list[int]], mode: dict[str, Any]) -> list[float]:
    """How far two turns in one mode lie from the same tokens computed at once."""
    found = []
    for prompt, question in documents(prompts):
        live.flush()
        conversation = answer(live, prompt, mode)
        cached, warm = ask(live, conversation, question, mode)
        assert cached >= PAGE
        live.flush()
        cached, cold = ask(live, conversation, question, mode)
        assert cached == 0
        found.append(distance(cold, warm))
    return found


@pytest.fixture(scope="module")
def noise(server: Server, prompts: list[list[int]]) -> list[float]:
    """Of dense after dense, on the dense server."""
    return noise_of(server("dense"), prompts, SPARSE)


@pytest.mark.parametrize("name", DENSE_PROMPT)
def test_a_dense_turn_after_a_sparse_one_is_a_cold_dense_servers(
    server: Server, prompts: list[list[int]], noise: list[float], name: str
) -> None:
    live, found = server(name), []
    for prompt, question in documents(prompts):
        live.flush()
        conversation = answer(live, prompt, SPARSE)
        cached, warm = ask(live, conversation, question, DENSE)
        assert cached == whole_pages(min(len(prompt), DENSE_PROMPT[name]))
        # Its own KV is there now, up to where log-probabilities begin, and serves the next turn.
        assert ask(live, conversation, question, DENSE)[0] == whole_pages(len(conversation))
        cold = server("dense")
        cold.flush()
        cached, expected = ask(cold, conversation, question, SPARSE)
        assert cached == 0
        found.append(distance(expected, warm))
    assert_no_more_than(noise, found)


@pytest.mark.parametrize("name", DENSE_PROMPT)
def test_a_sparse_turn_after_a_dense_one_is_a_cold_sparse_servers(
    server: Server, prompts: list[list[int]], noise: list[float], name: str
) -> None:
    live, found = server(name), []
    for prompt, question in documents(prompts):
        live.flush()
        conversation = answer(live, prompt, DENSE)
        cached, warm = ask(live, conversation, question, SPARSE)
        assert cached == whole_pages(min(len(conversation) - 1, DENSE_PROMPT[name]))
        live.flush()
        cached, expected = ask(live, conversation, question, SPARSE)
        assert cached == 0
        found.append(distance(expected, warm))
    assert_no_more_than(noise, found)


@pytest.mark.parametrize("name", DENSE_PROMPT)
def test_a_dense_turn_after_a_dense_one_is_a_cold_dense_servers(
    server: Server, prompts: list[list[int]], noise: list[float], name: str
) -> None:
    live, found = server(name), []
    for prompt, question in documents(prompts):
        live.flush()
        # A sparse request of the same prompt is first, so that both kinds of KV are there.
        answer(live, prompt, SPARSE)
        conversation = answer(live, prompt, DENSE)
        cached, warm = ask(live, conversation, question, DENSE)
        assert cached == whole_pages(len(conversation) - 1)
        cold = server("dense")
        cold.flush()
        found.append(distance(ask(cold, conversation, question, SPARSE)[1], warm))
    assert_no_more_than(noise, found)


def test_what_one_budget_decoded_is_no_prefix_of_another(
    server: Server, prompts: list[list[int]]
) -> None:
    live = server("sparcas")
    prompt, question = documents(prompts)[0]
    live.flush()
    conversation = answer(live, prompt, SPARSE)
    other = {"custom_params": {"sparse": {"budget": 512}}}
    assert ask(live, conversation, question, other)[0] == whole_pages(len(prompt))
    same = {"custom_params": {"sparse": {"budget": 256}}}
    assert ask(live, conversation, question, same)[0] == whole_pages(len(conversation) - 1)


@pytest.mark.parametrize("name", DENSE_PROMPT)
def test_no_extra_key_leads_a_dense_request_to_sparse_kv(
    server: Server, prompts: list[list[int]], name: str
) -> None:
    live = server(name)
    prompt, question = documents(prompts)[1]
    budget = live.sparse_state()["axes"]["budget"]
    amount = budget.get("tokens", budget.get("fraction"))
    branches = [Branch(None, ("decode", amount)), Branch(None, "prefill")]
    keys = [text for branch in branches for text in (repr(branch), repr(branch.saw))]
    live.flush()
    conversation = answer(live, prompt, SPARSE)
    for key in [*keys, "decode", "prefill", "dense", "|sglang_sparse:dense"]:
        assert ask(live, conversation, question, DENSE, extra_key=key)[0] == 0, key
    # Of one key, dense requests share what is dense.
    for key in (None, *keys[::2]):
        live.flush()
        keyed = {} if key is None else {"extra_key": key}
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": ANSWER}, **keyed}
        body["sampling_params"] |= {"temperature": 0, "ignore_eos": True}
        live.call("/generate", body)
        dense_part = whole_pages(min(len(prompt), DENSE_PROMPT[name]))
        assert ask(live, conversation, question, DENSE, **keyed)[0] == dense_part, key
    for key in ({"client_key": None, "saw": ["decode", amount]}, 7):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(live, conversation, question, DENSE, extra_key=key)
