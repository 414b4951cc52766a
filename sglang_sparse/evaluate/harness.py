# SPDX-License-Identifier: Apache-2.0
"""`lm-eval` tasks over the server's completions API, run once in every arm.

Only tasks that generate text measure sparse decoding. Tasks that score given answers read input
log-probabilities, which come from the prefill.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_sparse.config import ConfigError
from sglang_sparse.evaluate.arms import Arm
from sglang_sparse.evaluate.client import Server
from sglang_sparse.evaluate.journal import Journal
from sglang_sparse.evaluate.report import Z
from sglang_sparse.tasks import wilson

FLAG = "--lm-eval"


def check_installed(tasks: tuple[str, ...]) -> None:
    """Raise ConfigError if `tasks` are given but lm-eval, or a package it needs, is missing."""
    if tasks and (find_spec("lm_eval") is None or find_spec("tenacity") is None):
        raise ConfigError(
            flag=FLAG,
            value=",".join(tasks),
            problem="lm-eval is not installed",
            allowed="an installation with the extra [lm-eval]",
            remedy="pip install 'sglang-sparse[lm-eval]', or drop --lm-eval",
        )


def find_tasks(tasks: tuple[str, ...], tokenizer: str, lengths: tuple[int, ...]) -> Any:
    """lm-eval's `TaskManager` that knows `tasks`, or None if there are none.

    Args:
        tasks: names that lm-eval knows, or paths of YAML files.
        tokenizer, lengths: for tasks that generate prompts of given lengths, such as RULER.

    Raises:
        ConfigError: there is no such task.
    """
    if not tasks:
        return None
    from lm_eval.tasks import TaskManager

    by_name = [task for task in tasks if Path(task).suffix not in (".yaml", ".yml")]
    manager = TaskManager(
        include_defaults=bool(by_name),  # reading all of them takes many seconds
        metadata={"tokenizer": tokenizer, "max_seq_lengths": list(lengths)},
    )
    for task in tasks:
        if task not in manager.all_tasks if task in by_name else not Path(task).is_file():
            raise _refused(task, "there is no such task")
    return manager


def run(
    manager: Any,
    tasks: tuple[str, ...],
    server: Server,
    arms: list[Arm],
    journal: Journal,
    *,
    tokenizer: str,
    concurrency: int,
    folder: Path,
) -> None:
    """Run each task under each arm that is not in the journal yet.

    Args:
        manager: from :func:`find_tasks`.
        tasks: as given to :func:`find_tasks`.
        server: the server to ask.
        arms: the arms to compare; all have the same prompts.
        journal: where the cells of the table are stored.
        tokenizer: name or path.
        concurrency: requests at once.
        folder: where answers are kept, so that an interrupted run can be resumed.

    Raises:
        ConfigError: a task failed, or its data cannot be had.
    """
    for task in tasks:
        left = [arm for arm in arms if _key(task, arm) not in journal]
        try:
            loaded = manager.load([task]) if left else None
            for arm in left:
                found = _evaluate(loaded, server, arm, tokenizer, concurrency, folder)
                journal.add(_key(task, arm), cells=_cells(found, arm))
        except Exception as error:  # whatever a task, its data or a request ended with
            raise _refused(task, f"lm-eval failed: {type(error).__name__}: {error}") from error


def _evaluate(
    loaded: Any, server: Server, arm: Arm, tokenizer: str, concurrency: int, folder: Path
) -> Any:
    """Results of lm-eval, without the parts of its `simple_evaluate` that take seconds."""
    from lm_eval import evaluate
    from lm_eval.api.model import CachingLM
    from lm_eval.api.registry import get_model

    for task in loaded["tasks"].values():
        if task.get_config("output_type") == "generate_until":
            asked = {"custom_params": arm.custom_params}
            task.set_config(key="generation_kwargs", value=asked, update=True)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)  # the same examples for every arm
    model = get_model("local-completions")(
        model=server.model,
        base_url=f"{server.base_url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=tokenizer,
        add_bos_token=True,  # the token that the server puts before a text
        max_length=server.context_length(),  # longer prompts would be cut, from the left
        num_concurrent=concurrency,
        timeout=1800,
    )
    # One cache an arm: a request that scores a given answer does not carry the budget.
    cached = CachingLM(model, str(folder / f"lm-eval-{arm.name}.db"))
    return evaluate(lm=cached, task_dict=loaded, bootstrap_iters=1000)


def _key(task: str, arm: Arm) -> tuple[str, int, int, str]:
    return f"lm-eval {task}", 0, 0, arm.name


def _refused(task: str, problem: str) -> ConfigError:
    return ConfigError(
        flag=FLAG,
        value=task,
        problem=problem.splitlines()[0],
        allowed="names that `lm-eval ls tasks` lists, whose data is here or can be downloaded, or "
        "paths of task files in YAML",
        remedy="correct it, or drop --lm-eval",
    )


def _cells(found: dict[str, Any], arm: Arm) -> list[dict[str, Any]]:
    """A cell for each metric of each task, under lm-eval's name of the metric."""
    cells = []
    for task, row in found["results"].items():
        samples = found["samples"].get(task, [])
        for name, value in row.items():
            metric, _, filtered = name.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            seen = [s[metric] for s in samples if s["filter"] == filtered and metric in s]
            low, high = _interval(float(value), row.get(f"{metric}_stderr,{filtered}"), seen)
            cells.append(
                {
                    "task": f"{task} {name}",
                    "length": None,
                    "arm": arm.name,
                    "count": len(seen) or row.get("sample_len", 0),
                    "value": float(value),
                    "low": low,
                    "high": high,
                }
            )
    return cells


def _interval(value: float, error: object, seen: list[Any]) -> tuple[float | None, float | None]:
    """95 % interval: Wilson's if answers are right or wrong, else by lm-eval's standard error."""
    if seen and all(isinstance(one, int | float) and one in (0, 1) for one in seen):
        return wilson(int(sum(seen)), len(seen))
    if not isinstance(error, int | float):
        return None, None
    return value - Z * error, value + Z * error
