# SPDX-License-Identifier: Apache-2.0
"""Every preset beside fp8 KV: with lists that hold everything it answers as a dense fp8 server."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import chain

import pytest
from live_server import LiveServer, logprobs, token_ids
from local import METHODS
from machine import HAS_GPU

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(900),
    # In bf16, answers part at near ties; `tests/gpu` tells those from errors.
    pytest.mark.skipif(HAS_GPU, reason="tests/gpu asks fp8 servers there"),
]

Server = Callable[[str], LiveServer]
Answers = list[tuple[list[int], list[float]]]
TOKENS = 8
PICKED = (0, 6, 12)  # of the prompts: three documents, 1003 to 2503 tokens
CUT = 200  # tokens from the end: the model is sure of what follows a question, not of other text


def ask(live: LiveServer, prompts: list[list[int]], **asked: object) -> Answers:
    """Greedy tokens of some prompts and their log-probabilities, each alone and cold."""
    live.flush()
    answers: Answers = []
    for picked in PICKED:
        answer = live.generate([prompts[picked][:-CUT]], TOKENS, ignore_eos=True, **asked)
        answers.append((token_ids(answer)[0], logprobs(answer)))
    return answers


@pytest.fixture(scope="module")
def dense(server: Server, prompts: list[list[int]]) -> Answers:
    """What a dense server with fp8 KV says."""
    return ask(server("dense-fp8"), prompts)


def rms(changes: list[float]) -> float:
    return math.sqrt(statistics.fmean(change * change for change in changes))


@pytest.fixture(scope="module")
def rounding(server: Server, prompts: list[list[int]], dense: Answers) -> list[float]:
    """The changes of log-probabilities that fp8 KV makes on a dense server."""
    changes: list[float] = []
    for (got, some), (want, others) in zip(dense, ask(server("dense"), prompts), strict=True):
        for token, other, a, b in zip(got, want, some, others, strict=True):
            if token != other:
                break
            changes.append(abs(a - b))
    return changes


@pytest.fixture(scope="module")
def change(rounding: list[float]) -> float:
    """The largest of them."""
    return max(rounding)


def test_fp8_kv_changes_what_a_dense_server_says(change: float) -> None:
    assert change > 0.05


def test_two_ranks_answer_as_one_does(
    server: Server, prompts: list[list[int]], rounding: list[float], change: float
) -> None:
    one, two = (server(f"sparcas-fp8{ranks}") for ranks in ("", "-ranks"))
    for asked in ({}, {"custom_params": {"sparse": {"budget": 256}}}):
        want, got = ask(one, prompts, **asked), ask(two, prompts, **asked)
        parted, moved = 0, []
        for (tokens, some), (wanted, others) in zip(got, want, strict=True):
            # Sums over ranks have another order, so some of a prompt's many keys round otherwise:
            # how many is a matter of the machine's sums. Where two tokens are about as likely
            # answers part, and then go their way.
            apart = [i for i in range(TOKENS) if tokens[i] != wanted[i]]
            until = apart[0] if apart else TOKENS
            parted += bool(apart)
            moved += [abs(a - b) for a, b in zip(some[:until], others[:until], strict=True)]
            assert some[: until + 1] == pytest.approx(others[: until + 1], abs=change)
        assert parted <= 1
        # A key that rounds to the next number moves by a step of fp8. Its square is twelve times
        # the mean square of what rounding moves a key by, so fewer than one key of twelve does.
        assert rms(moved) < rms(rounding)
    state = two.sparse_state()
    assert (state["kv_cache_dtype"], len(state["ranks"])) == ("fp8_e4m3", 2)
    assert "int4" in state["plane_dtypes"].values()
    for rank in state["ranks"]:
        assert rank["decode_steps"]["sparse"] == 2 * len(PICKED) * (TOKENS - 1)
        assert rank["plane_check"]["pages"] > 0
        assert rank["plane_check"]["wrong"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_lists_that_hold_everything_give_the_dense_answers(
    server: Server, prompts: list[list[int]], dense: Answers, change: float, method: str
) -> None:
    live = server(f"{method}-fp8")
    before = live.sparse_state()["decode_steps"]["sparse"]
    answers = ask(live, prompts)
    state = live.sparse_state()
    assert state["kv_cache_dtype"] == "fp8_e4m3"
    assert state["decode_steps"]["sparse"] - before == len(PICKED) * (TOKENS - 1)
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in dense]
    # What is read is the same fp8 numbers: far closer than these are to what they stand for. Sums
    # in another order may round a key across a boundary of fp8, where it becomes the next number:
    # rarely, but every later layer and token sees it. A sparse prompt has many such keys. The few
    # that are decoded have at most one, by the order of sums on a machine: all tokens before it are
    # equal, and so are those of the other prompts.
    changes = [
        [abs(a - b) for a, b in zip(got, want, strict=True)]
        for (_, got), (_, want) in zip(answers, dense, strict=True)
    ]
    assert max(map(max, changes)) <= change / 4
    if not state["prefill_batches"]["sparse"]:
        assert sum(max(each) > change / 100 for each in changes) <= 1
        assert statistics.median(chain(*changes)) <= change / 10_000
    assert bool(state["plane_bytes"]) == (method != "kascade")  # exact scores need none
    asked = state["axes"]["score"].get("storage")
    words = {"key_sketch": "int4" if asked == "auto" else asked, "key_sketch_scale": "float16"}
    assert state["plane_dtypes"] == {p: words.get(p, "fp8") for p in state["plane_bytes"]}
    assert state["plane_check"]["pages"] > 0
    assert state["plane_check"]["wrong"] == 0
