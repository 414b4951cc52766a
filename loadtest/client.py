# SPDX-License-Identifier: Apache-2.0
"""Sends a streamed request to any SGLang server, and records when each of its tokens came.

It uses the standard library alone, so that it runs in threads and under gevent's monkey patches.
"""

import argparse
import http.client
import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
}


@dataclass
class Record:
    """The outcome of one request; times in seconds.

    Attributes:
        started: wall clock when it was sent.
        first_token: time from then to the first token; None if there was none.
        total: time from then to the end.
        gaps: times between one chunk of the stream and the next.
        queued: time in the server's queue, where the server reports it (`/generate` with metrics).
        prompt_tokens, cached_tokens, output_tokens: from the final usage. Over the OpenAI API a
            server reports cached tokens only with `--enable-cache-report`.
        retractions: how often the server took it out of the running batch for lack of room, where
            the server reports it (`/generate`).
        error: why it failed, or None.
        text: the answer.
    """

    name: str
    started: float = 0.0
    first_token: float | None = None
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)
    queued: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    retractions: int = 0
    error: str | None = None
    text: str = ""

    @property
    def time_per_token(self) -> float | None:
        """Mean time per output token after the first; None for fewer than two tokens."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.total - self.first_token) / (self.output_tokens - 1)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole request."""
        return self.output_tokens / self.total if self.total > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """One line of a records file."""
        return asdict(self) | {
            "time_per_token": self.time_per_token,
            "tokens_per_second": self.tokens_per_second,
        }


def connect(base_url: str, timeout: float) -> http.client.HTTPConnection:
    """A connection to the server of `base_url`."""
    parts = urlsplit(base_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "127.0.0.1", parts.port, timeout=timeout)


def call(base_url: str, path: str, body: dict[str, Any] | None = None, timeout: float = 60) -> Any:
    """One call; decoded JSON, or text.

    Raises:
        RuntimeError: the status is not 200.
    """
    connection = connect(base_url, timeout)
    try:
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, data, headers)
        response = connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {text[:300]}")
        return json.loads(text) if text[:1] in ("{", "[") else text
    finally:
        connection.close()


def server_url(url: str) -> str:
    """`type` of an argument: the address of a server that answers."""
    try:
        call(url, "/v1/models", timeout=10)
    except (OSError, RuntimeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"no SGLang server answers at {url} ({error})") from error
    return url


def encoded(api: str, body: dict[str, Any]) -> bytes:
    """A streamed request as it is sent.

    Long prompts take milliseconds, in which no other thread reads what came. So a load test does
    it before it begins.
    """
    body = body | {"stream": True}
    if api != "generate":
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body).encode()


def stream(
    base_url: str,
    api: str,
    body: dict[str, Any] | bytes,
    *,
    name: str,
    timeout: float = 600,
    stop_after: int | None = None,
) -> Record:
    """Send one request and follow its stream to the end. Failures are recorded, not raised.

    Args:
        base_url: such as `http://127.0.0.1:30000`.
        api: a key of `PATHS`.
        body: the request without the streaming keys, or what :func:`encoded` made of it.
        name: name of the record.
        timeout: longest time without a byte, in seconds.
        stop_after: disconnect after so many chunks, as an impatient client does.
    """
    data = body if isinstance(body, bytes) else encoded(api, body)
    record = Record(name, started=time.time())
    begin = time.perf_counter()
    last: float | None = None
    connection = connect(base_url, timeout)
    chunks, final = 0, b""
    try:
        connection.request("POST", PATHS[api], data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            record.error = f"status {response.status}: {response.read(300).decode()}"
        while record.error is None:
            line = response.readline()
            if not line or line.startswith(b"data: [DONE]"):
                break
            if not line.startswith(b"data: "):
                continue
            now = time.perf_counter()
            if api == "generate":
                final = line[6:]  # holds everything so far; the last one is read
                token = True
            else:
                token = _take_openai(record, json.loads(line[6:]))
            if not token:
                continue
            if last is None:
                record.first_token = now - begin
            else:
                record.gaps.append(now - last)
            last, chunks = now, chunks + 1
            if stop_after is not None and chunks >= stop_after:
                record.error = "hung up"
    except (OSError, http.client.HTTPException, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    record.total = time.perf_counter() - begin
    if final and record.error is None:
        _take_generate(record, json.loads(final))
    return record


def _take_openai(record: Record, event: dict[str, Any]) -> bool:
    """Record one event; True if it brought text."""
    if "error" in event:
        record.error = str(event["error"])[:300]
        return False
    usage = event.get("usage")
    if usage:
        record.prompt_tokens = usage["prompt_tokens"]
        record.output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens") or 0
    text = ""
    for choice in event.get("choices", ()):
        text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    record.text += text
    return bool(text)


def _take_generate(record: Record, event: dict[str, Any]) -> None:
    if "error" in event:
        record.error = str(event["error"])[:300]
        return
    meta = event["meta_info"]  # next to empty for a request that was aborted in the queue
    record.prompt_tokens = meta.get("prompt_tokens") or 0
    record.output_tokens = meta.get("completion_tokens") or 0
    record.cached_tokens = meta.get("cached_tokens") or 0
    record.retractions = meta.get("num_retractions") or 0
    record.queued = meta.get("queue_time")
    record.text = event.get("text") or ""
    finish = meta.get("finish_reason") or {}
    if finish.get("type") == "abort":
        record.error = "aborted"
