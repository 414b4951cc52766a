# SPDX-License-Identifier: Apache-2.0
"""Several tokenizer processes: whichever takes a request checks it and passes it on alike."""

import json
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import psutil
import pytest
from live_server import LiveServer, logprobs, token_ids
from rounding import logprob_error

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

Server = Callable[[str], LiveServer]
WORKERS = 2
TOKENS = 8
EVERYTHING = {"sparse": {"budget": 32768}}


def process_of(connection: HTTPConnection, server: int) -> int:
    """Which process of a server has the other end of a connection."""
    [port] = {connection.sock.getsockname()[1]}
    for process in psutil.Process(server).children(recursive=True):
        ends = process.net_connections("tcp")
        if any(end.raddr and end.raddr.port == port for end in ends):
            return process.pid
    raise AssertionError(f"no process of {server} has a connection from port {port}")


def ask(connection: HTTPConnection, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and decoded answer of one request on a connection that stays open."""
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def wait_until_warm(connection: HTTPConnection) -> None:
    """Return when the process at the other end has had its own request of the start answered."""
    for _ in range(600):
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        if response.status == 200:
            return
        time.sleep(0.2)
    raise AssertionError("a tokenizer process is not up after two minutes")


@pytest.fixture(scope="module")
def connections(server: Server) -> Iterator[list[HTTPConnection]]:
    """A connection to each tokenizer process."""
    live = server("tokenizers")
    address = live.url.removeprefix("http://")
    opened: list[HTTPConnection] = []
    found: dict[int, HTTPConnection] = {}
    for _ in range(100):
        connection = HTTPConnection(address, timeout=240)
        opened.append(connection)
        wait_until_warm(connection)
        found.setdefault(process_of(connection, live.pid), connection)
        if len(found) == WORKERS:
            break
    assert len(found) == WORKERS
    yield list(found.values())
    for connection in opened:
        connection.close()


def generate(prompt: list[int], custom_params: object) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return {
        "input_ids": prompt,
        "return_logprob": True,
        "sampling_params": sampling | {"custom_params": custom_params},
    }


def test_each_process_passes_on_what_a_request_asks_for(
    server: Server, prompts: list[list[int]], connections: list[HTTPConnection]
) -> None:
    live, prompt = server("tokenizers"), prompts[0]
    want = server("dense").generate([prompt], TOKENS, ignore_eos=True)
    for connection in connections:
        for custom_params, sparse in ((EVERYTHING, True), ({"sparse": {"mode": "dense"}}, False)):
            live.flush()
            before = live.sparse_state()["decode_steps"]
            status, got = ask(connection, "/generate", generate(prompt, custom_params))
            after = live.sparse_state()["decode_steps"]
            assert status == 200
            assert token_ids([got]) == token_ids(want)
            error = logprob_error(len(prompt) + TOKENS)
            assert logprobs([got]) == pytest.approx(logprobs(want), abs=error)
            steps = {name: after[name] - before[name] for name in after}
            expected = {"sparse": 0, "dense": 0, ("sparse" if sparse else "dense"): TOKENS - 1}
            assert steps == expected


@pytest.mark.parametrize("stream", [False, True])
def test_each_process_refuses_a_wrong_request(
    connections: list[HTTPConnection], stream: bool
) -> None:
    for connection in connections:
        body = generate([5, 6, 7], {"sparse": {"budget": -1}}) | {"stream": stream}
        status, said = ask(connection, "/generate", body)
        assert status == 400
        assert "custom_params.sparse" in json.dumps(said)


def test_each_process_reads_options_that_a_protocol_lacks(
    connections: list[HTTPConnection],
) -> None:
    for connection in connections:
        body = {
            "model": "reference",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "one two"}],
            "custom_params": {"sparse": {"budget": -1}},
        }
        status, said = ask(connection, "/v1/messages", body)
        assert status == 400
        assert "custom_params.sparse" in json.dumps(said)
