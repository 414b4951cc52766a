# SPDX-License-Identifier: Apache-2.0
"""Mixed load with aborts, disconnects, cancellations and flushes, then checks of the idle server.

    python loadtest soak --minutes 10 --out soak.json        # starts a server of its own
    python loadtest soak --minutes 10 --out soak.json --base-url URL --pid PID --log FILE

At the end the server is left idle, so that SGLang's own memory check runs (a leak ends the
server), every plane of the pages that the prefix cache holds is compared with recomputation
(`SGLANG_SPARSE_VERIFY=1`), and the resident memory of its processes is compared between the
second and the last quarter. A server that holds a bounded number of tokens a request (`cascade`)
has no planes: there every state slot has to be free again, snapshots have to have been used, and
a flush has to forget them. Exits with status 1 if any of it is wrong.
"""

import argparse
import json
import random
import statistics
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from client import call, server_url, stream
from compare_latency import output_of
from local import CONFIGURATIONS, Local, local_servers
from local import METHODS as SELECTING
from scenarios import Conversations, Scenario

BOUNDED = "cascade"
METHODS = (*SELECTING, BOUNDED)
SERVERS = CONFIGURATIONS | {
    BOUNDED: [
        *("--attention-backend", "sparse", "--sparse-method", BOUNDED),
        *("--sparse-config", '{"retention": {"snapshots": 4}}', "--chunked-prefill-size", "1024"),
    ]
}
WORKERS = 4
VERIFY = {"SGLANG_SPARSE_VERIFY": "1"}
# Growth of resident memory that counts as a leak; allocators and caches wobble below it.
MOST_GROWTH_MIB = 64.0
_BAD_LOG = ("Traceback", "leak detected", "Scheduler hit an exception")
Options = tuple[dict[str, Any] | None, ...]


def options_of(state: dict[str, Any]) -> Options:
    """Values of `custom_params.sparse` for requests, within the range that the server allows."""
    if "request_budget" not in state:
        return (None,)
    allowed = state["request_budget"]
    low, high = allowed["least"], allowed["most"]
    middle = (low + high) // 2 if isinstance(high, int) else (low + high) / 2
    return None, None, {"mode": "dense"}, {"budget": low}, {"budget": middle}


def refused_of(state: dict[str, Any]) -> Options:
    """Values of `custom_params.sparse` that the server has to refuse."""
    bad: Options = ({"budget": -1},)
    return bad if "request_budget" in state else (*bad, {"mode": "dense"}, {"budget": 64})


def sparse_state(url: str) -> dict[str, Any]:
    """The `sparse` block of `/server_info`: with the planes compared, or with state slots.

    Raises:
        ValueError: the server is dense, or has neither.
    """
    info = call(url, "/server_info", timeout=300)
    state: dict[str, Any] = (info.get("internal_states") or [{}])[0].get("sparse") or {}
    if not state.keys() & {"plane_check", "free_slots"}:
        raise ValueError(f"{url} is no sparse server with SGLANG_SPARSE_VERIFY=1 and a radix cache")
    return state


@dataclass
class Outcome:
    """Counts and faults of all workers."""

    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)


class Worker:
    """Sends one kind of request after another until the time is up."""

    def __init__(
        self, url: str, seed: int, outcome: Outcome, longest: int, state: dict[str, Any]
    ) -> None:
        self._url, self._outcome, self._source = url, outcome, random.Random(seed)
        self._options, self._bad = options_of(state), refused_of(state)
        mixed = Scenario(
            "soak", "", documents=4, document=(300, longest), output=(4, 32), think=(0, 2)
        )
        fresh = Scenario("soak", "", document=(0, 2 * longest // 3), output=(4, 32))
        model = call(url, "/v1/models")["data"][0]["id"]
        self._drawn = [Conversations(s, model, seed) for s in (mixed, mixed, fresh)]

    def run(self, deadline: float) -> None:
        """Work until `time.monotonic()` reaches `deadline`."""
        kinds: dict[str, tuple[Callable[[], None], int]] = {
            "answered": (self.answered, 10),
            "disconnected": (self._disconnected, 4),
            "aborted": (self._aborted, 3),
            "cancelled": (self._cancelled, 2),
            "refused": (self._refused, 2),
            "flushed": (self._flushed, 1),
        }
        names = list(kinds)
        weights = [weight for _, weight in kinds.values()]
        while time.monotonic() < deadline:
            name = self._source.choices(names, weights)[0]
            try:
                kinds[name][0]()
                self._outcome.done[name] += 1
            except Exception as error:
                self._outcome.faults.append(f"{name}: {type(error).__name__}: {error}"[:300])
                time.sleep(1)

    def _body(self) -> dict[str, Any]:
        body = next(self._source.choice(self._drawn).requests([]))
        options = self._source.choice(self._options)
        return body if options is None else body | {"custom_params": {"sparse": options}}

    def answered(self) -> None:
        """Send one request and follow it to its end; raises RuntimeError if it does not end."""
        record = stream(self._url, "chat", self._body(), name="soak", timeout=120)
        if record.error is not None:
            raise RuntimeError(record.error)

    def _disconnected(self) -> None:
        body = self._body() | {"max_tokens": 200}
        after = self._source.randint(1, 12)
        record = stream(self._url, "chat", body, name="soak", timeout=120, stop_after=after)
        if record.error not in (None, "hung up"):
            raise RuntimeError(record.error)

    def _aborted(self) -> None:
        rid = uuid.uuid4().hex
        timer = threading.Timer(
            self._source.uniform(0.05, 2), call, (self._url, "/abort_request", {"rid": rid})
        )
        sampling = {"max_new_tokens": 300, "ignore_eos": True}
        text = self._body()["messages"][0]["content"]
        body = {"text": text, "sampling_params": sampling, "rid": rid}
        timer.start()
        record = stream(self._url, "generate", body, name="soak", timeout=120)
        timer.join()
        if record.error not in (None, "aborted"):
            raise RuntimeError(record.error)

    def _cancelled(self) -> None:
        # A client that gives up before the first token.
        text = self._body()["messages"][0]["content"]
        sampling = {"max_new_tokens": 300, "ignore_eos": True}
        try:
            call(self._url, "/generate", {"text": text, "sampling_params": sampling}, timeout=0.3)
        except OSError:
            return

    def _refused(self) -> None:
        bad = self._source.choice(self._bad)
        body = self._body() | {"custom_params": {"sparse": bad}}
        record = stream(self._url, "chat", body, name="soak", timeout=120)
        if record.error is None or not record.error.startswith("status 400"):
            raise RuntimeError(f"{bad} was answered with {record.error}")

    def _flushed(self) -> None:
        try:
            call(self._url, "/flush_cache", {})
        except RuntimeError as error:
            if "400" not in str(error):  # refused while requests run
                raise


def resident_mib(pid: int) -> float:
    """Resident memory of a process and all that it started."""
    root = psutil.Process(pid)
    total = 0
    for process in (root, *root.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def growth_mib(samples: list[float]) -> float:
    """Median of the last quarter less the median of the second; the first is warming up."""
    quarter = max(1, len(samples) // 4)
    second = samples[quarter : 2 * quarter] or samples
    return statistics.median(samples[-quarter:]) - statistics.median(second)


def planes_kept(state: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Whether pages are cached and all their planes right, and what the report says of them."""
    planes = state["plane_check"]
    names = ("axes", "decode_steps", "plane_reuse")
    return planes["pages"] > 0 and planes["wrong"] == 0, {
        "planes": planes,
        **{name: state[name] for name in names},
    }


def slots_kept(url: str, state: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Whether every state slot is free, snapshots were used, and a flush forgets them."""
    call(url, "/flush_cache", {})
    snapshots = state["snapshots"]
    left = sparse_state(url)["snapshots"]["kept"]
    kept = (
        state["free_slots"] == state["slots"]
        and snapshots["kept"] <= min(snapshots["slots"], snapshots["taken"])
        and snapshots["restored"] > 0
        and left == 0
    )
    slots = {"all": state["slots"], "free": state["free_slots"]}
    return kept, {"slots": slots, "snapshots": {**snapshots, "kept_by_a_flush": left}}


def soak(server: Local, seconds: float, seed: int, longest: int = 2200) -> dict[str, Any]:
    """Load the server, then check it.

    Args:
        server: a server with `VERIFY` in its environment.
        seconds: length of the load.
        seed: seed of the requests.
        longest: words of the longest document.

    Returns:
        The report; `ok` says whether every check passed.

    Raises:
        ValueError: the server cannot say whether its planes are right, nor which slots are free.
    """
    outcome, state = Outcome(), sparse_state(server.url)
    logged = server.log.stat().st_size
    workers = [Worker(server.url, seed + n, outcome, longest, state) for n in range(WORKERS)]
    deadline = time.monotonic() + seconds
    threads = [threading.Thread(target=worker.run, args=(deadline,)) for worker in workers]
    for thread in threads:
        thread.start()
    while time.monotonic() < deadline:
        outcome.rss_mib.append(resident_mib(server.pid))
        time.sleep(min(2.0, max(0.1, seconds / 40)))
    for thread in threads:
        thread.join(180)
    # A last request leaves pages whose planes can be compared. Then SGLang's memory check runs
    # idle.
    for _ in range(3):
        workers[0].answered()
    time.sleep(3)
    state = sparse_state(server.url)
    kept, found = planes_kept(state) if "plane_check" in state else slots_kept(server.url, state)
    text = server.log.read_bytes()[logged:].decode(errors="replace")
    bad = [line for line in text.splitlines() if any(word in line for word in _BAD_LOG)]
    alive = psutil.pid_exists(server.pid) and bool(call(server.url, "/v1/models"))
    growth = growth_mib(outcome.rss_mib)
    return {
        "ok": alive and not outcome.faults and not bad and kept and growth <= MOST_GROWTH_MIB,
        "method": state["method"],
        "seconds": seconds,
        "requests": dict(outcome.done),
        "faults": outcome.faults[:20],
        "bad_log_lines": bad[:20],
        "alive": alive,
        **found,
        "rss_growth_mib": growth,
        "rss_mib": [round(value, 1) for value in outcome.rss_mib],
    }


def main() -> None:
    """Soak a server and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--method", default="sparcas", choices=METHODS, help="of a server that it starts"
    )
    parser.add_argument(
        "--base-url", type=server_url, help="a running server, with --pid and --log"
    )
    parser.add_argument("--pid", type=int)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.base_url:
        if args.pid is None or args.log is None:
            parser.error("--base-url needs --pid and --log")
        try:
            report = soak(Local(args.base_url, args.pid, args.log), 60 * args.minutes, args.seed)
        except ValueError as error:
            parser.error(str(error))
    else:
        with local_servers(
            {args.method: VERIFY}, args.out.parent, configurations=SERVERS
        ) as servers:
            report = soak(servers[args.method], 60 * args.minutes, args.seed)
    report["commit"] = output_of("git", "rev-parse", "--short", "HEAD")
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "rss_mib"}, indent=1))
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
