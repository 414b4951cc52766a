# SPDX-License-Identifier: Apache-2.0
"""The highest request rate that a server takes while its tokens still come fast enough.

    python loadtest capacity --out results --base-url http://127.0.0.1:30000 --label sparcas
    python loadtest capacity --out results --start dense sparcas    # in turn, on a GPU

As in the PSA paper (arXiv:2503.00392): requests arrive as a Poisson process, and a rate is within
capacity if the 99th percentile of the time between tokens stays under 5 x (strict) or 25 x
(relaxed) the decode step of a single request, and the median time in the queue under 2 seconds.
The rate is doubled until it fails and then bisected. Writes `LABEL.json` for each server, and
`capacity.html` for all that are in the folder.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arrivals import poisson
from client import Record, call, server_url, stream
from compare_latency import CONFIGURATIONS, gpu, output_of, running_server
from report import failed_at, write_report
from scenarios import Conversations, Scenario, scenario_name

FACTORS = {"strict": 5.0, "relaxed": 25.0}
MOST_QUEUED_SECONDS = 2.0
HERE = Path(__file__).parent
# What may be late without failing a rate: requests still running when the drain ends.
_MOST_UNFINISHED = 0.01


@dataclass(frozen=True)
class Settings:
    """How one server is measured.

    Attributes:
        seconds: that requests arrive for, a trial.
        drain: seconds that the last of them may take on top.
        first_rate: requests a second of the first trial.
        most_rate: where the search ends.
        bisections: of the interval that the doubling leaves.
        limit: seconds for all trials of a server; what is found by then is reported.
        seed: of arrivals and questions.
        burst: requests sent at once before the first trial.
    """

    seconds: float
    drain: float
    first_rate: float
    most_rate: float
    bisections: int
    limit: float
    seed: int
    burst: int = 0


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of `values` do not exceed; the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1e6) * len(ordered) // 10**6) - 1))]


def model_of(base_url: str) -> str:
    """The name that the server serves under."""
    return str(call(base_url, "/v1/models")["data"][0]["id"])


def unloaded(base_url: str, scenario: Scenario, seed: int, repeats: int = 3) -> dict[str, float]:
    """Decode step and time to the first token of one request alone, on a warm prefix."""
    source = Conversations(scenario, model_of(base_url), seed)
    records = []
    for number in range(repeats + scenario.documents):
        record = stream(base_url, scenario.api, next(source.requests([])), name=scenario.name)
        if record.error is not None:
            raise RuntimeError(f"a single request failed: {record.error}")
        if number >= scenario.documents:
            records.append(record)
    return {
        "step_s": statistics.median(gap for r in records for gap in r.gaps),
        "first_token_s": statistics.median(r.first_token or r.total for r in records),
    }


def warm(base_url: str, scenario: Scenario, burst: int = 0) -> None:
    """Bring every shared document into the prefix cache, then send `burst` requests at once.

    Kernels that a server compiles for its first batch of a kind would stop a trial for seconds.
    """
    source = Conversations(scenario, model_of(base_url), 0)
    for document in source.documents:
        only = Conversations(scenario, source.model, 1)
        only.documents = [document]
        record = stream(base_url, scenario.api, next(only.requests([])), name="warm")
        if record.error is not None:
            raise RuntimeError(f"warming failed: {record.error}")
    bodies = [next(source.requests([])) for _ in range(burst)]
    with ThreadPoolExecutor(max(burst, 1)) as pool:
        for body in bodies:
            pool.submit(stream, base_url, scenario.api, body, name="warm")


def trial(
    base_url: str, scenario: Scenario, rate: float, settings: Settings, alone: dict[str, float]
) -> dict[str, Any]:
    """Requests at one rate, and what became of them."""
    # Other questions than at other rates: a cache of single tokens would know the whole prompt.
    source = Conversations(scenario, model_of(base_url), f"{settings.seed}/{rate}")
    records: list[Record] = []
    threads: list[threading.Thread] = []

    def send(body: dict[str, Any]) -> None:
        records.append(stream(base_url, scenario.api, body, name=scenario.name))

    times = list(poisson(rate, settings.seconds, settings.seed))
    bodies = [next(source.requests([])) for _ in times]
    begin = time.perf_counter()
    for at, body in zip(times, bodies, strict=True):
        time.sleep(max(0.0, begin + at - time.perf_counter()))
        threads.append(threading.Thread(target=send, args=(body,), daemon=True))
        threads[-1].start()
    deadline = begin + settings.seconds + settings.drain
    for thread in threads:
        thread.join(max(0.0, deadline - time.perf_counter()))
    unfinished = sum(thread.is_alive() for thread in threads)
    seconds = time.perf_counter() - begin
    if unfinished:
        call(base_url, "/abort_request", {"abort_all": True})
        for thread in threads:
            thread.join(30)
    done = [record for record in records if record.error is None]
    failed = [r.error for r in records if r.error not in (None, "aborted")]
    gaps = [gap for record in records for gap in record.gaps]
    firsts = [r.first_token for r in done if r.first_token is not None]
    queued = [_queued(record, alone) for record in done]
    return {
        "rate": rate,
        "sent": len(times),
        "done": len(done),
        "unfinished": unfinished,
        "failed": len(failed),
        "first_failure": failed[0] if failed else None,
        "seconds": seconds,
        "gap_p50_s": percentile(gaps, 0.5) if gaps else None,
        "gap_p99_s": percentile(gaps, 0.99) if gaps else None,
        "first_token_p50_s": percentile(firsts, 0.5) if firsts else None,
        "queued_p50_s": percentile(queued, 0.5) if queued else None,
        "tokens_per_second": sum(r.output_tokens for r in done) / seconds,
        "prompt_tokens": statistics.median(r.prompt_tokens for r in done) if done else None,
        "cached_tokens": statistics.median(r.cached_tokens for r in done) if done else None,
    }


def _queued(record: Record, alone: dict[str, float]) -> float:
    """Seconds in the queue: the server's own figure, else how late the first token was."""
    if record.queued is not None:
        return record.queued
    return max(0.0, (record.first_token or record.total) - alone["first_token_s"])


def within(outcome: dict[str, Any], limit_s: float) -> bool:
    """Whether a trial met an objective on the time between tokens."""
    return (
        outcome["failed"] == 0
        and outcome["unfinished"] <= _MOST_UNFINISHED * outcome["sent"]
        and outcome["gap_p99_s"] is not None
        and outcome["gap_p99_s"] <= limit_s
        and outcome["queued_p50_s"] <= MOST_QUEUED_SECONDS
    )


def search(
    run: Callable[[float], dict[str, Any]],
    limits: dict[str, float],
    settings: Settings,
    note: Callable[[list[dict[str, Any]]], None] = lambda trials: None,
) -> list[dict[str, Any]]:
    """Trials in the order in which they were run: doubling, then bisection.

    Args:
        run: rate -> outcome of :func:`trial`.
        limits: seconds between tokens of each objective.
        settings: of the search.
        note: told the trials so far after each of them.
    """
    trials: list[dict[str, Any]] = []
    begin = time.perf_counter()

    def again() -> bool:
        return time.perf_counter() - begin < settings.limit

    def attempt(rate: float) -> dict[str, Any]:
        outcome = run(rate)
        outcome["within"] = {name: within(outcome, limit) for name, limit in limits.items()}
        trials.append(outcome)
        note(trials)
        print(json.dumps(outcome), flush=True)
        return outcome

    rate = settings.first_rate
    while again() and any(attempt(rate)["within"].values()) and rate < settings.most_rate:
        rate = min(2 * rate, settings.most_rate)
    # In turn, so that a limit of time leaves both objectives about as well known.
    for _ in range(settings.bisections):
        for name in limits:
            low = best_rate(trials, name)
            high = failed_at(trials, name)
            if high is not None and again():
                attempt((low + high) / 2 if low else high / 2)
    return trials


def best_rate(trials: list[dict[str, Any]], name: str) -> float:
    """The highest rate below every one that failed the objective; 0 if none met it."""
    failed = failed_at(trials, name)
    met = [t["rate"] for t in trials if t["within"][name]]
    return max((rate for rate in met if failed is None or rate < failed), default=0.0)


def measure(
    base_url: str,
    label: str,
    scenario: Scenario,
    settings: Settings,
    out: Path,
    **where: str | None,
) -> None:
    """Everything about one server; the report is written anew after each trial.

    Args:
        base_url: of the server.
        label: its name in the report.
        scenario: what is asked.
        settings: of the search.
        out: folder of the report, `LABEL.json`.
        where: what else to note: the device, the commit.
    """
    info = call(base_url, "/server_info")
    warm(base_url, scenario, settings.burst)
    alone = unloaded(base_url, scenario, settings.seed)
    limits = {name: factor * alone["step_s"] for name, factor in FACTORS.items()}
    print(json.dumps({"label": label, **alone}), flush=True)
    report = {
        "label": label,
        "scenario": scenario.name,
        "about": scenario.about,
        **where,
        "sglang": info.get("version"),
        "max_total_num_tokens": info.get("max_total_num_tokens"),
        "sparse": (info.get("internal_states") or [{}])[0].get("sparse"),
        "settings": asdict(settings),
        "unloaded": alone,
        "limits_s": limits,
    }

    def write(trials: list[dict[str, Any]]) -> None:
        report["capacity"] = {name: best_rate(trials, name) for name in limits}
        report["trials"] = trials
        (out / f"{label}.json").write_text(json.dumps(report, indent=1) + "\n")

    search(lambda r: trial(base_url, scenario, r, settings, alone), limits, settings, write)


def start_and_measure(args: argparse.Namespace, scenario: Scenario, settings: Settings) -> None:
    """Start each named configuration on a GPU, one after the other."""
    where = {
        "device": gpu("name"),
        "commit": args.commit or output_of("git", "rev-parse", "--short", "HEAD"),
        "flags": args.flags,
    }
    for label in args.start:
        # With metrics a server says how long each request was queued.
        flags = ("--enable-metrics", *shlex.split(args.flags))
        with running_server(label, args.model, args.port, args.max_batch, args.out, *flags) as url:
            measure(url, label, scenario, settings, args.out, **where)


def main() -> None:
    """Measure a running server, or start some and measure them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--scenario", type=scenario_name, default="shared_documents",
                        help="name, or path of a file")  # fmt: skip
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", type=server_url, help="a running server")
    where.add_argument("--start", nargs="+", choices=CONFIGURATIONS, help="servers to start")
    parser.add_argument("--label", help="name of the running server in the report")
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--port", type=int, default=31000)
    parser.add_argument("--flags", default="", help="more flags of the servers to start, as text")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--drain", type=float, default=20.0)
    parser.add_argument("--first-rate", type=float, default=1.0)
    parser.add_argument("--most-rate", type=float, default=256.0)
    parser.add_argument("--bisections", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of trials a server")
    parser.add_argument("--burst", type=int, default=32, help="requests at once, to warm up")
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.base_url and not args.label:
        parser.error("--base-url needs --label")
    args.out.mkdir(parents=True, exist_ok=True)
    names = ("seconds", "drain", "first_rate", "most_rate", "bisections", "limit", "seed", "burst")
    settings = Settings(**{name: getattr(args, name) for name in names})
    scenario = Scenario.load(args.scenario)
    if args.start:
        start_and_measure(args, scenario, settings)
    else:
        measure(args.base_url, args.label, scenario, settings, args.out)
    write_report(args.out)


if __name__ == "__main__":
    main()
