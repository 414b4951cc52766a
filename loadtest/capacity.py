# SPDX-License-Identifier: Apache-2.0
"""The highest request rate that a server takes while its tokens still come fast enough.

    python loadtest capacity --out here --base-url URL --label dense       # first
    python loadtest capacity --out here --base-url URL --label sparcas --limit-from here/dense.json
    python loadtest capacity --out here --start dense sparcas              # both in turn, on a GPU
    python loadtest capacity --out page --combine a/dense.json b/sparcas.json

Requests arrive as a Poisson process. :mod:`objectives` defines the limits that a rate has to meet.
They follow from the dense server's unloaded decode step and are the same for every server, unless
`--limit-ms` gives others. A search bisects one grid of rates (:mod:`rates`). At the same rate all
servers get the same arrivals and questions. The script writes `LABEL.json` for each server, and
`capacity.html` and `capacity.md` for all reports in the folder.
"""

import argparse
import json
import shlex
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from arrivals import poisson
from client import Record, call, encoded, server_url, stream
from compare_latency import METHODS, gpu, output_of, running_server, server_command
from objectives import (
    OWN,
    Objective,
    highest_met,
    lowest_missed,
    percentile,
    percentile_interval,
    verdict,
)
from rates import grid, search, try_rates
from report import read_reports, write_report
from scenarios import Conversations, Scenario, scenario_name

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Settings:
    """How every server of a comparison is measured.

    Attributes:
        seconds: length of a trial, in which requests arrive.
        drain: seconds after that in which the last requests may still end.
        least_rate: lowest rate of the grid, in requests a second.
        most_rate: highest rate of the grid.
        limit: seconds for the search of a running server, warming included. What it has found by
            then is reported.
        seed: seed of arrivals and questions.
        burst: requests sent at once before the first trial.
        rates: trials at these rates, in this order, instead of a search.
    """

    seconds: float
    drain: float
    least_rate: float
    most_rate: float
    limit: float
    seed: int
    burst: int = 0
    rates: tuple[float, ...] = ()


def model_of(base_url: str) -> str:
    """The name that the server serves under."""
    return str(call(base_url, "/v1/models")["data"][0]["id"])


def unloaded(base_url: str, scenario: Scenario, seed: int, repeats: int = 3) -> dict[str, float]:
    """Decode step and time to the first token of one request alone, after :func:`warm`."""
    source = Conversations(scenario, model_of(base_url), seed)
    records = []
    for _ in range(repeats):
        record = stream(base_url, scenario.api, next(source.requests([])), name=scenario.name)
        if record.error is not None:
            raise RuntimeError(f"a single request failed: {record.error}")
        records.append(record)
    return {
        "step_s": statistics.median(gap for r in records for gap in r.gaps),
        "first_token_s": statistics.median(r.first_token or r.total for r in records),
    }


def warm(base_url: str, scenario: Scenario, burst: int = 0) -> None:
    """Bring every shared document into the prefix cache, then send `burst` requests at once.

    A server compiles kernels for its first batch of a kind, which would stop a trial for seconds.
    """
    source = Conversations(scenario, model_of(base_url), 0)
    short = replace(scenario, output=(2, 2))
    for document in source.documents:
        only = Conversations(short, source.model, 1)
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
    """Send requests at one rate, and return the outcome."""
    # Questions differ from those of other rates, since the prefix cache would hold the whole
    # prompt.
    source = Conversations(scenario, model_of(base_url), f"{settings.seed}/{rate}")
    records: list[Record] = []
    threads: list[threading.Thread] = []

    def send(body: bytes) -> None:
        records.append(stream(base_url, scenario.api, body, name=scenario.name))

    times = list(poisson(rate, settings.seconds, settings.seed))
    bodies = [encoded(scenario.api, next(source.requests([]))) for _ in times]
    begin, wall = time.perf_counter(), time.time()
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
    # Only while requests arrive: the load falls off afterwards.
    samples = [s for record in records for s in _samples(record, wall) if s[0] <= settings.seconds]
    ends, gaps = [end for end, _ in samples], [gap for _, gap in samples]
    firsts = [r.first_token for r in done if r.first_token is not None]
    queued = [_queued(record, alone) for record in done]
    return {
        "rate": rate,
        "arrival_seconds": settings.seconds,
        "sent": len(times),
        "done": len(done),
        "unfinished": unfinished,
        "failed": len(failed),
        "first_failure": failed[0] if failed else None,
        "seconds": seconds,
        "gaps": len(gaps),
        "gap_p50_s": percentile(gaps, 0.5) if gaps else None,
        "gap_p99_s": percentile(gaps, 0.99) if gaps else None,
        "gap_p99_interval_s": percentile_interval(ends, gaps),
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


def _samples(record: Record, wall: float) -> list[tuple[float, float]]:
    """(end in seconds after `wall`, length) of each gap between tokens."""
    first = record.started - wall + (record.first_token or 0.0)
    return list(zip(accumulate(record.gaps, initial=first), [0.0, *record.gaps], strict=True))[1:]


def measure(
    base_url: str,
    label: str,
    scenario: Scenario,
    settings: Settings,
    out: Path,
    objective: Objective = OWN,
    resume: bool = False,
    **where: str | None,
) -> None:
    """Measure one server; the report is written anew after each trial.

    Args:
        base_url: address of the server.
        label: its name in the report.
        scenario: the requests.
        settings: settings of the search.
        out: folder of the report, `LABEL.json`.
        objective: the limits.
        resume: continue an existing report.
        where: further entries of the report: the device, the commit.

    Raises:
        ValueError: there is no limit, or the existing report has other settings.
    """
    begin, path = time.monotonic(), out / f"{label}.json"
    info = call(base_url, "/server_info")
    sparse = (info.get("internal_states") or [{}])[0].get("sparse")
    objective.check(bool(sparse))
    warm(base_url, scenario, settings.burst)
    prior = json.loads(path.read_text()) if resume and path.exists() else None
    alone = prior["unloaded"] if prior else unloaded(base_url, scenario, settings.seed)
    limits = objective.limits(alone["step_s"])
    print(json.dumps({"label": label, **alone, "limits_s": limits}), flush=True)
    report = {
        "label": label,
        "scenario": scenario.name,
        "about": scenario.about,
        **where,
        "sglang": info.get("version"),
        "max_total_num_tokens": info.get("max_total_num_tokens"),
        "sparse": sparse,
        "settings": asdict(settings),
        "unloaded": alone,
        "limits_s": limits,
        "limits_from": objective.source or f"{label}.json",
    }
    trials: list[dict[str, Any]] = []
    if prior:
        check_same(report, prior, path)
        trials = prior["trials"]

    def write() -> None:
        report["capacity"] = {
            name: {"met": highest_met(trials, name), "missed": lowest_missed(trials, name)}
            for name in limits
        }
        report["trials"] = trials
        path.write_text(json.dumps(report, indent=1) + "\n")

    def run(rate: float) -> dict[str, Any]:
        outcome = trial(base_url, scenario, rate, settings, alone)
        outcome["verdicts"] = {name: verdict(outcome, limit) for name, limit in limits.items()}
        trials.append(outcome)
        write()
        print(json.dumps(outcome), flush=True)
        return outcome

    write()
    longest = settings.seconds + settings.drain
    left = settings.limit - (time.monotonic() - begin)
    if settings.rates:
        try_rates(run, settings.rates, seconds=left, longest=longest, trials=trials)
        return
    rates = grid(settings.least_rate, settings.most_rate)
    search(run, limits, rates, seconds=left, longest=longest, trials=trials)


def check_same(report: dict[str, Any], prior: dict[str, Any], path: Path) -> None:
    """Raise ValueError unless a report can be continued."""
    same = ("scenario", "limits_s", "sglang", "commit")
    names = [name for name in same if report.get(name) != prior.get(name)]
    names += [n for n in ("seconds", "seed") if report["settings"][n] != prior["settings"][n]]
    if names:
        raise ValueError(
            f"--resume: {path} was measured with another {', '.join(names)}; leave --resume out"
        )


def start_and_measure(
    args: argparse.Namespace, scenario: Scenario, settings: Settings, objective: Objective
) -> None:
    """Start each named configuration on a GPU with its preset as shipped, one after the other."""
    where = {
        "device": gpu("name"),
        "commit": args.commit or output_of("git", "rev-parse", "--short", "HEAD"),
        "flags": args.flags,
    }
    begin = time.monotonic()
    for label in args.start:
        # With metrics a server says how long each request was queued.
        flags = ["--enable-metrics", *shlex.split(args.flags)]
        attention = [*as_shipped(label), *flags]
        command = server_command(args.model, args.port, args.max_batch, attention)
        logs = args.logs or args.out
        with running_server(command, args.port, logs / f"{label}.log") as url:
            objective.wait(args.limit_wait)
            left = settings.limit if args.total is None else begin + args.total - time.monotonic()
            within = replace(settings, limit=min(settings.limit, left))
            measure(url, label, scenario, within, args.out, objective, args.resume, **where)
        if objective == OWN:  # of the first, which is dense
            objective = Objective(report=args.out / f"{label}.json")


def as_shipped(label: str) -> list[str]:
    """Flags of a server with a method's preset as shipped, or of a dense one with equal pages."""
    if label == "dense":
        return ["--attention-backend", "flashinfer", "--page-size", "64"]
    return ["--attention-backend", "sparse", "--sparse-method", label]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the reports")
    parser.add_argument("--scenario", type=scenario_name, default="shared_documents",
                        help="name, or path of a file")  # fmt: skip
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", type=server_url, help="a running server")
    where.add_argument("--start", nargs="+", choices=("dense", *METHODS), help="servers to start")
    where.add_argument("--combine", nargs="+", type=Path, metavar="REPORT",
                       help="reports of several servers, to put on one page")  # fmt: skip
    limits = parser.add_mutually_exclusive_group()
    limits.add_argument("--limit-from", type=Path, metavar="REPORT",
                        help="dense server's report, whose unloaded step limits all")  # fmt: skip
    parser.add_argument("--limit-wait", type=float, default=0.0,
                        help="seconds to wait for that report, with --start")  # fmt: skip
    limits.add_argument("--limit-ms", type=float, nargs="+", help="limits in milliseconds instead")
    parser.add_argument("--resume", action="store_true", help="go on with LABEL.json of --out")
    parser.add_argument("--no-page", action="store_true", help="leave the page to --combine")
    parser.add_argument("--label", help="name of the running server in the report")
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--port", type=int, default=31000)
    parser.add_argument("--logs", type=Path, help="folder of the logs of servers it starts")
    parser.add_argument("--flags", default="", help="more flags of the servers to start, as text")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, a trial")
    parser.add_argument("--drain", type=float, default=20.0, help="seconds for the last answers")
    parser.add_argument("--least-rate", type=float, default=0.25)
    parser.add_argument("--most-rate", type=float, default=256.0)
    parser.add_argument("--rates", type=float, nargs="+", default=(),
                        help="trials at these rates instead of a search")  # fmt: skip
    parser.add_argument(
        "--limit", type=float, default=1200.0, help="seconds a server, once it is up"
    )
    parser.add_argument("--total", type=float,
                        help="seconds until the last trial ends, starts included")  # fmt: skip
    parser.add_argument("--burst", type=int, default=32, help="requests at once, to warm up")
    parser.add_argument("--commit", help="what is measured, where there is no git checkout")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.base_url and not args.label:
        parser.error("--base-url needs --label")
    if args.start and not (args.limit_from or args.limit_ms or args.start[0] == "dense"):
        parser.error("--start: name dense first, or give --limit-from or --limit-ms")
    return args


def main() -> None:
    """Measure a running server, start some and measure them, or combine reports."""
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    names = ("seconds", "drain", "least_rate", "most_rate", "limit", "seed", "burst")
    values = {name: getattr(args, name) for name in names}
    settings = Settings(**values, rates=tuple(args.rates))
    try:
        if args.combine:
            print(write_report(args.out, read_reports(args.combine)))
            return
        objective = Objective(args.limit_from, tuple(args.limit_ms or ()))
        scenario = Scenario.load(args.scenario)
        if args.start:
            start_and_measure(args, scenario, settings, objective)
        else:
            measure(args.base_url, args.label, scenario, settings, args.out, objective, args.resume)
        if not args.no_page:
            print(write_report(args.out))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
