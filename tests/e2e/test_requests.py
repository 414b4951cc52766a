# SPDX-License-Identifier: Apache-2.0
"""What one request asks for: dense rows, budgets of their own, and what is refused with a 400."""

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import openai
import pytest
from live_server import LiveServer, token_ids

from sglang_sparse.serve_reference import FACT, example_lines

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

Server = Callable[[str], LiveServer]
TOKENS = 8
DENSE = {"sparse": {"mode": "dense"}}
CHOOSY = {"sparse": {"budget": 256}}


def ask(live: LiveServer, prompts: list[list[int]], params: list[Any]) -> list[list[int]]:
    """Greedy tokens of one batch whose rows each have ``custom_params`` of their own."""
    sampling = [
        {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, "custom_params": p}
        for p in params
    ]
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    return token_ids(live.call("/generate", body))


def post(live: LiveServer, path: str, body: Any) -> tuple[int, str]:
    """Status and text of one call, whatever it is."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(live.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_rows_of_one_batch_answer_as_servers_that_were_started_so(
    server: Server, prompts: list[list[int]]
) -> None:
    ids = prompts[0:3]
    expected: dict[str, list[list[int]]] = {}
    for name in ("dense", "sparcas"):
        live = server(name)
        live.flush()
        expected[name] = [token_ids(live.generate([p], TOKENS, ignore_eos=True))[0] for p in ids]
    live = server("sparcas")
    live.flush()
    rows = [ids[0], ids[1], ids[2], ids[0], ids[1], ids[2]]
    # The server's budget holds everything; three rows ask for the 256 tokens of the other server.
    answers = ask(live, rows, [CHOOSY, None, CHOOSY, DENSE, CHOOSY, DENSE])
    choosy, dense = expected["sparcas"], expected["dense"]
    assert answers == [choosy[0], dense[1], choosy[2], dense[0], choosy[1], dense[2]]


def test_the_line_that_make_serve_prints_is_answered_with_the_fact(server: Server) -> None:
    live = server("sparcas")
    body, _, _ = example_lines(live.url)[0].rpartition(" | ")  # without curl
    run = subprocess.run(["bash", "-c", body], capture_output=True, text=True, check=True)
    answer = live.call("/v1/chat/completions", json.loads(run.stdout))
    assert answer["usage"]["prompt_tokens"] > 4000
    assert answer["choices"][0]["message"]["content"] == FACT


def test_a_batch_that_asked_to_be_dense_runs_the_dense_variant(
    server: Server, prompts: list[list[int]]
) -> None:
    live = server("sparcas")
    before = live.sparse_state()["decode_steps"]
    ask(live, prompts[4:6], [DENSE, DENSE])
    after = live.sparse_state()["decode_steps"]
    assert after["sparse"] == before["sparse"]
    assert after["dense"] > before["dense"]
    # Its rows are another's afterwards.
    ask(live, prompts[4:6], [None, None])
    assert live.sparse_state()["decode_steps"]["sparse"] >= before["sparse"] + TOKENS - 1


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_the_openai_client_asks_by_extra_body(server: Server, api: str) -> None:
    live = server("sparcas")
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none")
    text = "The sky is blue. " * 30
    ran = []
    for options in ({"mode": "dense"}, {"budget": 100}):
        before = live.sparse_state()["decode_steps"]
        common: dict[str, Any] = {"model": "reference", "max_tokens": 4, "temperature": 0}
        common["extra_body"] = {"custom_params": {"sparse": options}, "ignore_eos": True}
        if api == "chat":
            client.chat.completions.create(messages=[{"role": "user", "content": text}], **common)
        else:
            client.completions.create(prompt=text, **common)
        after = live.sparse_state()["decode_steps"]
        ran.append({variant: after[variant] - before[variant] for variant in after})
    assert ran == [{"dense": 3, "sparse": 0}, {"dense": 0, "sparse": 3}]
    common["extra_body"] = {"custom_params": {"sparse": {"budget": 1}}}
    with pytest.raises(openai.BadRequestError, match="budget 1"):
        client.completions.create(prompt=text, **common)


def test_a_prefix_that_a_dense_request_wrote_serves_a_sparse_one(
    server: Server, prompts: list[list[int]]
) -> None:
    live = server("sparcas")
    live.flush()
    cold = ask(live, [prompts[4]], [None])
    live.flush()
    ask(live, [prompts[4]], [DENSE])
    reused = live.sparse_state()["plane_reuse"]["tokens"]
    assert ask(live, [prompts[4]], [None]) == cold
    assert live.sparse_state()["plane_reuse"]["tokens"] > reused


def generate(params: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    """A ``/generate`` call with these ``custom_params``."""
    sampling = {"max_new_tokens": 2, "custom_params": params}
    return "/generate", {"text": "The", "sampling_params": sampling, **more}


def chat(params: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    """The same over OpenAI's chat API."""
    messages = [{"role": "user", "content": "The"}]
    body = {"model": "reference", "messages": messages, "max_tokens": 2, "custom_params": params}
    return "/v1/chat/completions", body | more


def completion(params: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    """The same over OpenAI's completions API."""
    body = {"model": "reference", "prompt": "The", "max_tokens": 2, "custom_params": params}
    return "/v1/completions", body | more


def message(params: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    """The same over Anthropic's messages API."""
    messages = [{"role": "user", "content": "The"}]
    body = {"model": "reference", "messages": messages, "max_tokens": 2, "custom_params": params}
    return "/v1/messages", body | more


def response(params: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    """The same over OpenAI's responses API."""
    body = {"model": "reference", "input": "The", "max_output_tokens": 4, "custom_params": params}
    return "/v1/responses", body | more


def ollama_chat(params: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    """The same over Ollama's chat API, which streams unless told otherwise."""
    messages = [{"role": "user", "content": "The"}]
    body = {"model": "reference", "messages": messages, "stream": False, "custom_params": params}
    return "/api/chat", body | {"options": {"num_predict": 4}} | more


def ollama_generate(params: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    """The same over Ollama's completions API."""
    body = {"model": "reference", "prompt": "The", "stream": False, "custom_params": params}
    return "/api/generate", body | {"options": {"num_predict": 4}} | more


LONG = "The sky is blue. " * 30
LONG_MESSAGES = {"messages": [{"role": "user", "content": LONG}]}
# Endpoints whose protocols have no custom_params, each with a prompt of more than 64 tokens.
FOREIGN: dict[str, tuple[Callable[..., tuple[str, dict[str, Any]]], dict[str, Any]]] = {
    "messages": (message, LONG_MESSAGES | {"max_tokens": 4}),
    "responses": (response, {"input": LONG}),
    "ollama generate": (ollama_generate, {"prompt": LONG}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", FOREIGN)
def test_endpoints_of_other_protocols_carry_custom_params(
    server: Server, name: str, stream: bool
) -> None:
    live = server("sparcas")
    make, long = FOREIGN[name]
    ran = []
    for params in (DENSE, {"sparse": {"budget": 100}}, None):
        before = live.sparse_state()["decode_steps"]
        path, body = make(params, stream=stream, **long)
        if params is None:
            del body["custom_params"]
        status, text = post(live, path, body)
        assert status == 200, text
        after = live.sparse_state()["decode_steps"]
        ran.append([variant for variant in after if after[variant] > before[variant]])
    assert ran == [["dense"], ["sparse"], ["sparse"]]
    status, text = post(live, *make({"sparse": {"budget": 1}}, stream=stream))
    assert status == 400
    assert "custom_params.sparse.budget 1" in text
    assert RANGE in text


RANGE = "49 to 32768"
# name -> (path and body, words of the answer); the status is 400 each time.
MALFORMED: dict[str, tuple[tuple[str, Any], list[str]]] = {
    "an unknown key": (generate({"sparse": {"bugdet": 128}}), ["sparse.bugdet", RANGE]),
    "an unknown mode": (generate({"sparse": {"mode": "fast"}}), ["sparse.mode fast", "dense"]),
    "no object": (generate({"sparse": "dense"}), ["custom_params.sparse dense", RANGE]),
    "null": (generate({"sparse": None}), ["custom_params.sparse None"]),
    "a list": (generate({"sparse": [{"mode": "dense"}]}), ["custom_params.sparse ["]),
    "a budget as text": (generate({"sparse": {"budget": "128"}}), ["sparse.budget 128", RANGE]),
    "a budget as truth": (generate({"sparse": {"budget": True}}), ["sparse.budget True", RANGE]),
    "a budget as object": (generate({"sparse": {"budget": {"tokens": 128}}}), [RANGE]),
    "a share for tokens": (generate({"sparse": {"budget": 0.1}}), ["0.1", "whole", RANGE]),
    "too small a budget": (generate({"sparse": {"budget": 48}}), ["sparse.budget 48", RANGE]),
    "too large a budget": (generate({"sparse": {"budget": 32769}}), ["32769", RANGE, "max_tokens"]),
    "a key of a megabyte": (generate({"sparse": {"k" * 10**6: 1}}), ["sparse.kkk", "not a key"]),
    "a huge budget": (generate({"sparse": {"budget": 10**18}}), ["sparse.budget 10", RANGE]),
    "dense with a budget": (
        generate({"sparse": {"mode": "dense", "budget": 128}}),
        ["sparse.budget 128", "dense"],
    ),
    "params that are text": (generate("dense"), ["custom_params dense", "object"]),
    "a stream": (generate({"sparse": {"budget": 1}}, stream=True), ["sparse.budget 1", RANGE]),
    "chat": (chat({"sparse": {"budget": 1}}), ["sparse.budget 1", RANGE]),
    "a chat stream": (chat({"sparse": {"budget": 1}}, stream=True), ["sparse.budget 1", RANGE]),
    "a completion": (completion({"sparse": {"mode": 3}}), ["sparse.mode 3"]),
    "a completion stream": (
        completion({"sparse": {"mode": 3}}, stream=True),
        ["sparse.mode 3"],
    ),
    "one row of a batch": (
        (
            "/generate",
            {
                "text": ["The", "A"],
                "sampling_params": [
                    {"max_new_tokens": 2},
                    {"max_new_tokens": 2, "custom_params": {"sparse": {"budget": 5}}},
                ],
            },
        ),
        ["sparse.budget 5", RANGE],
    ),
    # Ollama's chat answers nothing else in this SGLang: its prompt is no list of tokens.
    "an Ollama chat": (ollama_chat({"sparse": {"budget": 1}}), ["sparse.budget 1", RANGE]),
    "a message": (message({"sparse": {"mode": "fast"}}), ["sparse.mode fast", "dense"]),
    "response params that are text": (response("dense"), ["custom_params dense", "object"]),
    "chat params that are text": (chat("dense"), ["custom_params"]),
    "broken JSON": (("/generate", b'{"text": "The", '), ["JSON"]),
    "no prompt": (("/generate", {"sampling_params": {}}), ["text"]),
    "a prompt beyond the context": (
        ("/generate", {"input_ids": [5] * 40000, "sampling_params": {}}),
        ["longer than the model's context"],
    ),
    "an unknown sampling value": (
        ("/generate", {"text": "The", "sampling_params": {"temperature": -1}}),
        ["temperature"],
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_gets_a_400_and_the_server_lives_on(server: Server, name: str) -> None:
    live = server("sparcas")
    (path, body), words = MALFORMED[name]
    status, text = post(live, path, body)
    assert status == 400, text
    for word in words:
        assert word in text, text
    assert len(text) < 2000
    assert live.is_alive()
    status, text = post(live, *generate({"sparse": {"budget": 128}}))
    assert status == 200, text
