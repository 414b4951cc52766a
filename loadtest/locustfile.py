# SPDX-License-Identifier: Apache-2.0
"""Locust users over a server's streaming API.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:30000 --scenario shared_documents
    locust -f loadtest/locustfile.py,loadtest/shapes/ramp.py ...      # with a shape
    locust -f loadtest/locustfile.py --arrivals poisson --rate 2 ...  # open loop

Closed-loop users wait for an answer, think, and ask again. With Poisson arrivals requests come
whether or not earlier ones are done, and the number of users multiplies the rate. Beside each
request (`E2E`), Locust's statistics hold events for the time to the first token (`TTFT`) and the
time per further token (`TPOT`), both in milliseconds, and for tokens per second (`TOK/S`).
`--records FILE` writes a JSON line for every request.
"""

import itertools
import json
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from typing import Any

import gevent
from gevent.lock import Semaphore
from locust import User, events, task
from locust.env import Environment
from locust.user.task import LOCUST_STATE_STOPPING

sys.path.insert(0, str(Path(__file__).parent))

from arrivals import poisson
from client import Record, call, stream
from scenarios import Conversations, Scenario, scenario_name

_HOUR = 3600.0
_numbers = itertools.count()
_writing = Semaphore()


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of this file, which Locust's web page shows too."""
    parser.add_argument("--scenario", type=scenario_name, default="shared_documents",
                        help="name, or path of a file")  # fmt: skip
    parser.add_argument("--arrivals", choices=("closed", "poisson"), default="closed")
    parser.add_argument("--rate", type=_rate, default=1.0, help="requests a second, a user")
    parser.add_argument(
        "--records", type=_records, default="", help="file for a JSON line a request"
    )
    parser.add_argument("--seed", type=int, default=1)


def _rate(text: str) -> float:
    if not 0 < (rate := float(text)) < float("inf"):
        raise ArgumentTypeError("must be above 0")
    return rate


def _records(path: str) -> str:
    if path and not Path(path).absolute().parent.is_dir():
        raise ArgumentTypeError(f"there is no folder {Path(path).parent}")
    return path


def report(environment: Environment, record: Record) -> None:
    """Fire Locust's events for one request, and write its line."""
    failure = None if record.error is None else RuntimeError(record.error)
    values: dict[str, float | None] = {"E2E": 1000 * record.total}
    if failure is None:
        first, each = record.first_token, record.time_per_token
        values["TTFT"] = None if first is None else 1000 * first
        values["TPOT"] = None if each is None else 1000 * each
        values["TOK/S"] = record.tokens_per_second
    for kind, value in values.items():
        if value is not None:
            environment.events.request.fire(
                request_type=kind,
                name=record.name,
                response_time=value,
                response_length=record.output_tokens,
                exception=failure,
                context={},
            )
    path = environment.parsed_options.records
    if path:
        with _writing, open(path, "a") as file:
            file.write(json.dumps(record.to_json()) + "\n")


class SparseUser(User):
    """One user of the scenario, or one source of Poisson arrivals."""

    def on_start(self) -> None:
        """Read the scenario; each user draws conversations of its own."""
        options: Any = self.environment.parsed_options
        self.scenario = Scenario.load(options.scenario)
        model = call(self.host, "/v1/models")["data"][0]["id"]
        self.number = next(_numbers)
        self.conversations = Conversations(self.scenario, model, options.seed + self.number)

    @task
    def ask(self) -> None:
        """One burst of conversations, then a pause; or an hour of arrivals."""
        options: Any = self.environment.parsed_options
        if options.arrivals == "poisson":
            self._arrive(options.rate, options.seed + self.number)
            return
        running = [gevent.spawn(self._converse) for _ in range(self.scenario.burst)]
        try:
            gevent.joinall(running)
        finally:
            gevent.killall(running)
        gevent.sleep(self.conversations.think_seconds())

    def _arrive(self, rate: float, seed: int) -> None:
        running, begin = [], time.monotonic()
        try:
            for at in poisson(rate, _HOUR, seed):
                while (left := begin + at - time.monotonic()) > 0 and not self._stopping():
                    gevent.sleep(min(left, 0.2))
                if self._stopping():
                    break
                running.append(gevent.spawn(self._converse))
            gevent.joinall(running)  # as long as --stop-timeout lets them
        finally:
            gevent.killall(running)

    def _stopping(self) -> bool:
        return bool(self._state == LOCUST_STATE_STOPPING)

    def _converse(self) -> None:
        answers: list[str] = []
        for turn, body in enumerate(self.conversations.requests(answers)):
            if turn:
                gevent.sleep(self.conversations.think_seconds())
            record = stream(self.host, self.scenario.api, body, name=self.scenario.name)
            report(self.environment, record)
            if record.error is not None:
                return
            answers.append(record.text)
