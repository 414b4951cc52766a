# SPDX-License-Identifier: Apache-2.0
"""Streams are timed, counted and judged as the load tests need them."""

import http.server
import json
import threading
import time
from typing import Any, ClassVar

import pytest

import scripts  # noqa: F401  isort: skip  # makes the load tests importable
import client  # isort: skip


class Script(http.server.BaseHTTPRequestHandler):
    """Streams what the test wrote, with a pause before each event."""

    lines: tuple[tuple[float, str], ...] = ()
    status = 200

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        self.end_headers()
        for pause, line in self.lines:
            time.sleep(pause)
            self.wfile.write(f"data: {line}\n\n".encode())
            self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        """Quiet."""


def streamed(
    lines: list[tuple[float, str]],
    api: str,
    status: int = 200,
    body: dict[str, Any] | bytes | None = None,
) -> client.Record:
    handler = type("Handler", (Script,), {"lines": tuple(lines), "status": status})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        record = client.stream(url, api, body or {"model": "m"}, name="n", timeout=5)
        server.shutdown()
    return record


def delta(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}], "usage": None})


def test_a_stream_is_timed_by_its_chunks_and_counted_by_its_usage() -> None:
    usage = {
        "prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}
    }  # fmt: skip
    role = json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    lines = [(0, role), (0.2, delta("a")), (0.1, delta("b")), (0.1, delta("c"))]
    lines += [(0, json.dumps({"choices": [], "usage": usage})), (0, "[DONE]")]
    record = streamed(lines, "chat")
    assert record.error is None
    assert record.text == "abc"
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (9, 4, 3)
    # The server sleeps that long at least; a busy machine adds to it, and moves it between gaps.
    assert 0.2 <= record.first_token < 2
    assert len(record.gaps) == 2
    assert 0.3 <= record.first_token + record.gaps[0] < 2
    assert 0.4 <= record.first_token + sum(record.gaps) < 2
    assert record.time_per_token == pytest.approx((record.total - record.first_token) / 2)
    assert record.to_json()["tokens_per_second"] == pytest.approx(3 / record.total)


def test_generate_streams_are_read_off_their_last_event() -> None:
    def event(count: int, kind: str | None) -> str:
        meta = {
            "prompt_tokens": 5, "completion_tokens": count, "cached_tokens": 1, "queue_time": 0.25,
            "finish_reason": kind and {"type": kind},
        }  # fmt: skip
        return json.dumps({"text": "x" * count, "meta_info": meta})

    lines = [(0.0, event(1, None)), (0.0, event(2, None)), (0.0, event(2, "length")), (0, "[DONE]")]
    record = streamed(lines, "generate")
    assert (record.error, record.output_tokens, record.queued) == (None, 2, 0.25)
    assert streamed([(0.0, event(1, "abort"))], "generate").error == "aborted"
    waiting = json.dumps({"text": "", "meta_info": {"finish_reason": {"type": "abort"}}})
    assert streamed([(0.0, waiting)], "generate").error == "aborted"


@pytest.mark.parametrize("api", ["chat", "generate"])
def test_a_request_may_be_encoded_before_it_is_sent(api: str) -> None:
    body = {"model": "m"}
    Script.bodies.clear()
    for form in (body, client.encoded(api, body)):
        streamed([(0, "[DONE]")], api, body=form)
    asked = body | {"stream": True}
    if api == "chat":
        asked["stream_options"] = {"include_usage": True}
    assert Script.bodies == [asked, asked]
    assert body == {"model": "m"}


def test_failures_are_recorded_and_not_raised() -> None:
    refused = streamed([(0, "no")], "chat", status=400)
    assert str(refused.error).startswith("status 400")
    assert streamed([(0, json.dumps({"error": "broken"}))], "chat").error == "broken"
    assert "Refused" in str(client.stream("http://127.0.0.1:9", "chat", {}, name="n").error)
