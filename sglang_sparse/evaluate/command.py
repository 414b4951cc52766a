# SPDX-License-Identifier: Apache-2.0
"""`sglang-sparse eval`, once its arguments are parsed."""

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_sparse.config import ConfigError
from sglang_sparse.evaluate import harness, report
from sglang_sparse.evaluate.arms import make_arms
from sglang_sparse.evaluate.client import Server
from sglang_sparse.evaluate.journal import Journal
from sglang_sparse.evaluate.run import Plan, check_tasks, run
from sglang_sparse.tasks import TASKS
from sglang_sparse.tasks.registry import MAX_LENGTH, MIN_LENGTH


@dataclass(frozen=True)
class Request:
    """The arguments of the command line; see its help."""

    base_url: str
    out: Path
    budgets: list[str]
    tasks: tuple[str, ...]
    lengths: str
    count: int
    seed: int
    text: Path | None
    decoded: int
    tokenizer: str | None
    lm_eval: tuple[str, ...]
    concurrency: int


def evaluate_server(request: Request) -> None:
    """Measure, then write the files and print the table.

    Raises:
        ConfigError: an argument is wrong; one line.
        RuntimeError: the server refused a request, or ended.
    """
    lengths = _lengths(request.lengths)
    check_tasks(request.tasks)
    if not (request.tasks or request.text or request.lm_eval):
        raise ConfigError(
            flag="--tasks",
            value="",
            problem="there is nothing to ask",
            allowed=f"some of {', '.join(TASKS)}; or --text, or --lm-eval",
            remedy="name some",
        )
    text = None if request.text is None else _text_hash(request.text)
    if find_spec("matplotlib") is None:
        raise ConfigError(
            flag="eval",
            value=None,
            problem="matplotlib, which draws the plot, is not installed",
            allowed="an installation with the extra [eval]",
            remedy="pip install 'sglang-sparse[eval]'",
        )
    harness.check_installed(request.lm_eval)
    server = Server(request.base_url)
    arms = make_arms(request.budgets, server.state)
    tokenizer = request.tokenizer or server.tokenizer_path
    manager = harness.find_tasks(request.lm_eval, tokenizer, lengths)
    encoder = server.encoder(request.tokenizer)
    settings = _settings(request, server, lengths, text)
    journal = Journal(request.out, settings)
    plan = Plan(
        tasks=request.tasks,
        lengths=lengths,
        count=request.count,
        seed=request.seed,
        text=request.text,
        decoded=request.decoded,
        concurrency=request.concurrency,
    )
    run(plan, server, encoder, arms, journal)
    harness.run(
        manager,
        request.lm_eval,
        server,
        arms,
        journal,
        tokenizer=tokenizer,
        concurrency=request.concurrency,
        folder=request.out,
    )
    found = report.cells(journal.entries(), arms)
    report.publish(request.out, settings, found, arms, Console())


def _lengths(text: str) -> tuple[int, ...]:
    lengths = tuple(int(part) if part.strip().isdigit() else 0 for part in text.split(","))
    if not all(MIN_LENGTH <= length <= MAX_LENGTH for length in lengths):
        raise ConfigError(
            flag="--lengths",
            value=text,
            problem="not a list of lengths",
            allowed=f"{MIN_LENGTH} to {MAX_LENGTH} tokens, separated by commas",
            remedy="correct it",
        )
    return lengths


def _text_hash(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            flag="--text",
            value=str(path),
            problem=f"it cannot be read ({error})",
            allowed="a text file in UTF-8",
            remedy="name one",
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _settings(
    request: Request, server: Server, lengths: tuple[int, ...], text: str | None
) -> dict[str, Any]:
    """The settings that may not change when an evaluation is resumed; budgets and tasks may."""
    return {
        "model": server.model,
        "method": server.state["method"],
        "preset_hash": server.state["preset_hash"],
        "budget_unit": server.state["request_budget"]["unit"],
        "sglang": server.state["sglang"],
        "version": server.state["version"],
        "lengths": list(lengths),
        "count": request.count,
        "seed": request.seed,
        "text": text,
        "decoded": request.decoded,
    }
