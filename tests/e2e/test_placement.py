# SPDX-License-Identifier: Apache-2.0
"""KV in host memory over HTTP, beside a server that has all of it on the device."""

import json
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from live_server import LiveServer, logprobs, token_ids
from scripts import LOADTEST

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

Server = Callable[[str], LiveServer]
RESIDENT, HOSTED = "placed-on-device", "placed-on-host"
PAGE, TOKENS = 16, 20
# The share of the mass that the server reaches, and others.
BUDGETS: list[dict[str, object]] = [
    {} if share is None else {"custom_params": {"sparse": {"budget": share}}}
    for share in (None, None, None, 0.5, 1.0, None, 0.5)
]


def alone(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts in chunks, behind prefixes, with and without a full last page, around evictions."""
    one, two, three = (prompts[i] for i in (2, 7, 12))
    return [
        one[:603],
        one[:603],
        one[:603] + two[:30],
        two[:700],
        three[: PAGE * 40],
        one[:300] + three[:233],
        one[:603],
    ]


def test_answers_are_those_of_kv_on_the_device_to_the_bit(
    server: Server, prompts: list[list[int]]
) -> None:
    answers, reached = {}, {}
    for name in (RESIDENT, HOSTED):
        live = server(name)
        live.flush()
        before = live.sparse_state()["progress"]
        answers[name] = [
            live.generate([prompt], TOKENS, ignore_eos=True, **asked)[0]
            for prompt, asked in zip(alone(prompts), BUDGETS, strict=True)
        ]
        after = live.sparse_state()["progress"]
        reached[name] = {layer: after[layer]["blocks"] - before[layer]["blocks"] for layer in after}
    resident, hosted = answers[RESIDENT], answers[HOSTED]
    assert token_ids(hosted) == token_ids(resident)
    assert logprobs(hosted) == logprobs(resident)
    assert reached[HOSTED] == reached[RESIDENT]
    found = [
        [answer["meta_info"]["cached_tokens"] for answer in those] for those in (resident, hosted)
    ]
    assert found[0] == found[1]
    assert sum(count > 0 for count in found[0]) >= 3
    state = server(HOSTED).sparse_state()
    assert state["plane_check"]["wrong"] == 0
    assert state["plane_check"]["pages"] > 0
    blocks = state["frames"]["host_bytes"] // state["frames"]["frame_bytes"]
    assert state["frames"]["frames"] < 0.8 * blocks
    assert state["frames"]["hits"] > state["frames"]["loads"] > 0
    assert state["frames"]["unserved"] == 0


def test_requests_at_once_that_are_retracted_answer_alike(
    server: Server, prompts: list[list[int]]
) -> None:
    # Two prompts share a batch. All outgrow the pool, so one is retracted and computed anew.
    batch = [prompts[i][:230] for i in (2, 7, 12)]
    answers = {}
    for name in (RESIDENT, HOSTED):
        live = server(name)
        live.flush()
        before = retracted(live), batches_of_two(live)
        answers[name] = live.generate(batch, 125, ignore_eos=True)
        assert retracted(live) > before[0]
        assert batches_of_two(live) > before[1]
    assert token_ids(answers[HOSTED]) == token_ids(answers[RESIDENT])
    change = zip(logprobs(answers[HOSTED]), logprobs(answers[RESIDENT]), strict=True)
    assert max(abs(a - b) for a, b in change) <= 1e-4


def retracted(live: LiveServer) -> int:
    """Requests that were retracted so far, by the server's log."""
    return live.log.read_text().count("KV cache pool is full. Retract")


def batches_of_two(live: LiveServer) -> int:
    """Prefill batches of two prompts so far, by the server's log."""
    return live.log.read_text().count("Prefill batch, #new-seq: 2,")


def test_short_requests_attend_to_everything(server: Server, prompts: list[list[int]]) -> None:
    # Short rows take the operators here, and SGLang's dense backend on the device.
    short = [prompts[0][:n] for n in (5, 17, 63)]
    answers = [server(name).generate(short, 30, ignore_eos=True) for name in (RESIDENT, HOSTED)]
    assert token_ids(answers[0]) == token_ids(answers[1])
    change = zip(logprobs(answers[0]), logprobs(answers[1]), strict=True)
    assert max(abs(a - b) for a, b in change) <= 1e-3


def test_aborted_requests_leave_memory_and_planes_right(
    server: Server, prompts: list[list[int]]
) -> None:
    live = server(HOSTED)
    for index, after in ((4, 0.1), (9, 1.0)):  # in its prompt, and while it decodes
        sampling = {"max_new_tokens": 400, "ignore_eos": True}
        body = {"rid": f"aborted-{index}", "sampling_params": sampling}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(live.call, "/generate", body | {"input_ids": prompts[index][:600]})
            time.sleep(after)
            live.call("/abort_request", {"rid": body["rid"]})
            ended = asked.result()["meta_info"]
        assert ended["finish_reason"]["type"] == "abort"
    assert live.sparse_state()["plane_check"]["wrong"] == 0
    # SGLang checks its memory where it is idle, and ends the server if a page was lost.
    live.flush()
    assert live.is_alive()


def test_a_request_that_outgrows_the_pool_is_cut_or_refused_alone(
    server: Server, prompts: list[list[int]]
) -> None:
    # SGLang cuts what a request may write to what an empty pool holds, less a page. So the last
    # one that decodes finds room, and SGLang's abort for want of slots is not reached.
    live = server(HOSTED)
    # A prompt that leaves no page beside it would wait for ever, and all others behind it.
    outgrowing, small, longer = prompts[7][:752], prompts[2][:60], prompts[12][: 1024 - PAGE]
    whole: dict[str, object] = {"custom_params": {"sparse": {"budget": 1.0}}}
    live.flush()
    before = live.generate([outgrowing], TOKENS, ignore_eos=True)
    beside = live.generate([small], TOKENS, ignore_eos=True, **whole)
    live.flush()
    prefills = live.log.read_text().count("Prefill batch")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(live.generate, [outgrowing], 1024 - 752, ignore_eos=True)
        while live.log.read_text().count("Prefill batch") < prefills + 2 and not asked.done():
            time.sleep(0.02)
        again = live.generate([small], TOKENS, ignore_eos=True, **whole)
        refused = [refusal(live, outgrowing, 1024 - 752 + 1), refusal(live, longer, 1)]
        assert not asked.done()
        cut = asked.result()
    assert token_ids(again) == token_ids(beside)
    assert refused[0][0] == refused[1][0] == 400
    assert "exceeds the model's maximum context length of 1024 tokens" in refused[0][1]
    assert f"exceeds the maximum allowed length ({1024 - PAGE} tokens)" in refused[1][1]
    longest = live.generate([longer[:-1]], 1, ignore_eos=True)
    assert longest[0]["meta_info"]["prompt_tokens"] == 1024 - PAGE - 1
    room = 1024 - 752 - PAGE - 1
    assert cut[0]["meta_info"]["finish_reason"] == {"type": "length", "length": room}
    assert len(token_ids(cut)[0]) == room
    assert token_ids(cut)[0][:TOKENS] == token_ids(before)[0]
    assert "aborted last request" not in live.log.read_text()
    assert live.sparse_state()["plane_check"]["wrong"] == 0
    live.flush()
    assert live.call("/v1/loads")["loads"][0]["num_used_tokens"] == 0
    after = live.generate([outgrowing], TOKENS, ignore_eos=True)
    assert token_ids(after) == token_ids(before)
    assert logprobs(after) == logprobs(before)
    assert live.is_alive()


def refusal(live: LiveServer, prompt: list[int], tokens: int) -> tuple[int, str]:
    """Status and text with which a request is refused."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        live.generate([prompt], tokens, ignore_eos=True)
    return refused.value.code, refused.value.read().decode()


def test_metrics_count_what_is_found_and_loaded(server: Server, prompts: list[list[int]]) -> None:
    live = server(HOSTED)
    live.sparse_state()  # publishes all counts
    before = live.metrics()
    live.generate([prompts[1][:700]], TOKENS, ignore_eos=True)
    state, after = live.sparse_state()["frames"], live.metrics()
    assert after["frame_hits_total", ""] == state["hits"] > before["frame_hits_total", ""]
    assert after["frame_loads_total", ""] == state["loads"] > before["frame_loads_total", ""]
    assert after["frame_loaded_bytes_total", ""] == state["loads"] * state["frame_bytes"]
    stall = "frame_stall_nanoseconds_total", ""
    assert after[stall] == state["stall_nanoseconds"] > before[stall]
    page = state["frame_bytes"] * live.sparse_state()["kv_heads"] * 6
    # The second chunk reads the first one, and its open page for decoding; a step fills that.
    pages = {"prompt_written": -(-700 // PAGE), "prompt_read": 512 // PAGE + 1, "frame_flushed": 1}
    for name, count in pages.items():
        key = f"{name}_bytes_total", ""
        assert after[key] - before[key] == count * page, name
        assert after[key] == state[name.removeprefix("frame_") + "_bytes"]


def test_a_request_for_dense_gets_a_400(server: Server, prompts: list[list[int]]) -> None:
    live = server(HOSTED)
    with pytest.raises(urllib.error.HTTPError) as refused:
        live.generate([prompts[0][:50]], 1, custom_params={"sparse": {"mode": "dense"}})
    assert refused.value.code == 400
    assert "lie in host memory" in refused.value.read().decode()


def test_requests_that_fit_are_those_none_of_which_is_retracted(server: Server) -> None:
    live = server(RESIDENT)
    live.flush()
    command = [sys.executable, str(LOADTEST / "requests_that_fit.py"), "--base-url", live.url]
    # The pool holds 1,024 tokens: room to begin three requests, and to finish two. SGLang admits
    # the third, which may come late, by guesses of what the others still write: short prompts
    # leave room for that until they have written some 100 tokens.
    command += ["--length", "16", "--tokens", "360", "--most", "3", "--vocab", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["max_total_num_tokens"] == 1024
    assert found["held"] == 2
    assert [(r["sent"], r["at_once"]) for r in found["rounds"]] == [(3, 3), (2, 2)]
    assert found["rounds"][0]["retracted"] > 0


def test_frames_of_unset_device_bytes_hold_four_steps(
    server: Server, prompts: list[list[int]]
) -> None:
    live = server("placed-unsized")
    live.generate([prompts[3][:700]], TOKENS, ignore_eos=True)
    state = live.sparse_state()
    # A list and the open page, of two requests and of padding; six layers.
    assert state["frames"]["frames"] == 4 * 3 * (128 // PAGE + 1) * 6 * state["kv_heads"]
    taken = state["axes"]["placement"]["device_bytes"]
    assert f"host(device_bytes={taken}, " in live.log.read_text()
