# SPDX-License-Identifier: Apache-2.0
"""Ask every prompt in every arm, and store each answer."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_sparse.config import ConfigError
from sglang_sparse.evaluate.arms import Arm
from sglang_sparse.evaluate.client import Server
from sglang_sparse.evaluate.journal import Journal, Key
from sglang_sparse.tasks import TASKS, Encoder, Sample, TaskSuite, is_exact, recall

PERPLEXITY = "perplexity"
_SPARE_TOKENS = 8  # an answer may be worded a little longer than the expected one
Job = tuple[Key, Callable[[], dict[str, object]]]


@dataclass(frozen=True)
class Plan:
    """The prompts of an evaluation.

    Attributes:
        tasks: names in `TASKS`.
        lengths: tokens of the prompts.
        count: prompts for each task and length.
        seed: seed of the generator.
        text: file for perplexity, or None.
        decoded: tokens of the text that are decoded after each prompt.
        concurrency: requests at once.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    count: int
    seed: int
    text: Path | None
    decoded: int
    concurrency: int


def check_tasks(tasks: tuple[str, ...]) -> None:
    """Raise ConfigError for an unknown task."""
    for task in tasks:
        if task not in TASKS:
            raise ConfigError(
                flag="--tasks",
                value=task,
                problem="there is no such task",
                allowed=", ".join(TASKS),
                remedy="name some of these, separated by commas",
            )


def run(plan: Plan, server: Server, encoder: Encoder, arms: list[Arm], journal: Journal) -> None:
    """Ask everything that the journal does not hold yet, with a progress bar.

    Raises:
        ConfigError: the text is too short, or the server cannot force tokens.
        RuntimeError: the server refused a request, or ended.
    """
    jobs = [job for job in _jobs(plan, server, encoder, arms) if job[0] not in journal]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        Progress(*columns, TimeRemainingColumn()) as progress,
        ThreadPoolExecutor(plan.concurrency) as pool,
    ):
        bar = progress.add_task("prompts", total=len(jobs))
        running = {pool.submit(ask): key for key, ask in jobs}
        try:
            for done in as_completed(running):
                journal.add(running[done], **done.result())
                progress.advance(bar)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _jobs(plan: Plan, server: Server, encoder: Encoder, arms: list[Arm]) -> list[Job]:
    jobs: list[Job] = []
    if plan.tasks:
        suite = TaskSuite(encoder, split="heldout")
        for length in plan.lengths:
            for task in plan.tasks:
                for sample in suite.samples(task, length, plan.count, plan.seed):
                    for arm in arms:
                        key = (task, length, sample.index, arm.name)
                        jobs.append((key, partial(_ask, server, sample, arm)))
    if plan.text is not None:
        jobs += _perplexity_jobs(plan, plan.text, server, encoder, arms)
    return jobs


def _ask(server: Server, sample: Sample, arm: Arm) -> dict[str, object]:
    reply = server.reply(sample.messages, len(sample.answer_ids) + _SPARE_TOKENS, arm)
    return {
        "exact": is_exact(sample, reply),
        "recall": recall(sample, reply),
        "reply": reply,
        "values": sample.values,
    }


def _perplexity_jobs(
    plan: Plan, text: Path, server: Server, encoder: Encoder, arms: list[Arm]
) -> list[Job]:
    from sglang_sparse.evaluate.forcing import serialized

    if not server.info.get("enable_custom_logit_processor"):
        raise ConfigError(
            flag="--text",
            value=str(text),
            problem="the server cannot decode a given text",
            allowed="a server with --enable-custom-logit-processor",
            remedy="restart it with that flag, or drop --text",
        )
    ids, processor = encoder.encode(text.read_text(encoding="utf-8")), serialized()
    jobs: list[Job] = []
    for length in plan.lengths:
        context = length - plan.decoded
        windows = min(plan.count, (len(ids) - length) // plan.decoded + 1)
        if context < 1 or windows < 1:
            raise ConfigError(
                flag="--text",
                value=str(text),
                problem=f"{len(ids)} tokens are too few for {length}",
                allowed=f"a text of {length} tokens and lengths above {plan.decoded}",
                remedy="give a longer text, or a smaller --lengths",
            )
        step = (len(ids) - length) // max(windows - 1, 1)
        for index in range(windows):
            window = ids[index * step : index * step + length]
            for arm in arms:
                key = (PERPLEXITY, length, index, arm.name)
                ask = partial(_force, server, window[:context], window[context:], arm, processor)
                jobs.append((key, ask))
    return jobs


def _force(
    server: Server, prompt: list[int], forced: list[int], arm: Arm, processor: str
) -> dict[str, object]:
    from sglang_sparse.evaluate.forcing import SCALE

    logprobs = server.forced_logprobs(prompt, forced, arm, processor)
    # The prefill computes the first token, and is the same in every arm.
    decoded = [-SCALE * logprob for logprob in logprobs[1:]]
    return {"nll": sum(decoded) / len(decoded), "tokens": len(decoded)}
