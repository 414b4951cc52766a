# SPDX-License-Identifier: Apache-2.0
"""The prompts that a calibration measures on: a JSON Lines file, or generated ones."""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_sparse.config import ConfigError
from sglang_sparse.tasks import TASKS, HuggingFaceEncoder, TaskSuite

FORMAT = 'one JSON object a line, {"prompt": TEXT} or {"messages": [{"role": ..., "content": ...}]}'
GENERATED_LENGTH = 4096
_MOST_NAMED = 5


@dataclass(frozen=True)
class Prompts:
    """Token ids of every prompt, and the hash of the lines that hold them."""

    ids: list[list[int]]
    sha256: str


def load_prompts(
    path: Path | None, tokenizer: Any, *, count: int, min_tokens: int, max_tokens: int, seed: int
) -> Prompts:
    """Read ``path``, or generate prompts if it is None.

    Args:
        path: a JSON Lines file in :data:`FORMAT`.
        tokenizer: a transformers tokenizer.
        count: prompts to take, drawn at random with ``seed`` if the file has more.
        min_tokens: fewest tokens of a prompt.
        max_tokens: longer prompts are cut to this length.
        seed: seed of the draw, or of the generated prompts.

    Raises:
        ConfigError: the file cannot be read, holds no prompt, or has bad lines, which are named.
    """
    value = "none given" if path is None else str(path)
    try:
        raw = _generate(tokenizer, count, max_tokens, seed) if path is None else path.read_bytes()
        lines = raw.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _refuse(value, f"it cannot be read ({error})") from error
    ids, wrong = [], []
    for number, line in enumerate(lines, start=1):
        try:
            tokens = _encode(line, tokenizer)
            if len(tokens) < min_tokens:
                raise ValueError(
                    f"has {len(tokens)} tokens, which is too short (least {min_tokens})"
                )
            ids.append(tokens[:max_tokens])
        except ValueError as error:
            wrong.append(f"line {number} {error}")
    if wrong:
        more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise _refuse(value, ", ".join(wrong[:_MOST_NAMED]) + more)
    if not ids:
        raise _refuse(value, "it holds no prompt")
    if len(ids) > count:
        chosen = sorted(random.Random(seed).sample(range(len(ids)), count))
        ids = [ids[i] for i in chosen]
    return Prompts(ids, hashlib.sha256(raw).hexdigest())


def _refuse(value: str, problem: str) -> ConfigError:
    return ConfigError(
        flag="--prompts", value=value, problem=problem, allowed=FORMAT, remedy="correct the file"
    )


def _encode(line: str, tokenizer: Any) -> list[int]:
    """Token ids of one line; raises ValueError that says what is wrong with it."""
    if not line.strip():
        raise ValueError("is empty")
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg})") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if isinstance(content, dict) and isinstance(content.get("messages"), list):
        try:
            ids = tokenizer.apply_chat_template(content["messages"], return_dict=False)
        except Exception as error:  # templates raise what they like
            raise ValueError(f"does not fit the chat template ({error})") from error
        return [int(token) for token in ids]
    if isinstance(content, dict) and isinstance(content.get("prompt"), str):
        if not content["prompt"].strip():
            raise ValueError("has an empty prompt")
        try:
            return [int(token) for token in tokenizer.encode(content["prompt"])]
        except (TypeError, ValueError) as error:  # half of a surrogate pair
            raise ValueError(f"cannot be tokenized ({error})") from error
    raise ValueError("has neither a prompt nor messages")


def _generate(tokenizer: Any, count: int, max_tokens: int, seed: int) -> bytes:
    """Lines with chats over the tasks in turn, with answers, since those attend to the needles."""
    suite = TaskSuite(HuggingFaceEncoder(tokenizer), "train")
    length = min(max_tokens, GENERATED_LENGTH)
    names = [name for name in TASKS if name != "dialogue"]  # which has earlier turns
    if getattr(tokenizer, "chat_template", None):
        to_line: Callable[[str, str], dict[str, Any]] = _chat
    else:
        to_line = _plain
    lines = []
    for i in range(count):
        # A template may add more than the sample left room for.
        sample = suite.sample(names[i % len(names)], length - 64, seed, i)
        lines.append(json.dumps(to_line(sample.content, sample.answer)))
    return ("\n".join(lines) + "\n").encode()


def _chat(question: str, answer: str) -> dict[str, Any]:
    roles = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in roles]}


def _plain(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": f"{question}\n{answer}"}
