# SPDX-License-Identifier: Apache-2.0
"""The one error that a wrong flag ends with, and pydantic's errors turned into it."""

import re
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sglang_sparse.choices.choice import InvalidConfig as InvalidConfig

_MAX_VALUE_CHARS = 120
_UNION_MEMBER = re.compile(r"(literal|tuple)\[|[A-Z]")


class ConfigError(ValueError):
    """A setting that cannot be served, told in one line.

    The line reads `<flag> <value>: <problem>; allowed: <allowed>; <remedy>`.

    Attributes:
        flag: the flag that carried the setting, such as `--sparse-config`.
        value: what the user gave, shortened for the line.
        problem: what is wrong with it.
        allowed: what would have been right.
        remedy: what to do about it, in the imperative.
    """

    def __init__(self, *, flag: str, value: str | None, problem: str, allowed: str, remedy: str):
        self.flag = flag
        self.value = value
        self.problem = problem
        self.allowed = allowed
        self.remedy = remedy
        head = flag if value is None else f"{flag} {shorten(value)}"
        super().__init__(_one_line(f"{head}: {problem}; allowed: {allowed}; {remedy}"))


def from_validation_error(
    error: ValidationError,
    *,
    flag: str,
    value: str,
    key_sets: dict[tuple[str, ...], list[str]],
    remedy: str,
) -> ConfigError:
    """Flatten `error` into one line.

    Args:
        error: what pydantic raised for the whole config.
        flag: the flag that carried the setting.
        value: what the user gave.
        key_sets: the keys that each object of the config may hold, by its path with the choice's
            `kind` in it, such as `("budget", "tokens")`.
        remedy: what to do, unless the broken rule says it.
    """
    details = error.errors(include_url=False)
    for detail in details:
        broken = detail.get("ctx", {}).get("error")
        if isinstance(broken, InvalidConfig):
            return ConfigError(
                flag=flag,
                value=value,
                problem=broken.problem,
                allowed=broken.allowed,
                remedy=broken.remedy,
            )
    told = [_describe(detail, key_sets) for detail in details]
    return ConfigError(
        flag=flag,
        value=value,
        problem=", ".join(dict.fromkeys(problem for problem, _ in told)),
        allowed=", ".join(dict.fromkeys(allowed for _, allowed in told)),
        remedy=remedy,
    )


def shorten(value: str) -> str:
    """Return `value` on one line and no longer than an error line can bear."""
    line = _one_line(value)
    return line if len(line) <= _MAX_VALUE_CHARS else f"{line[: _MAX_VALUE_CHARS - 3]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _describe(detail: ErrorDetails, key_sets: dict[tuple[str, ...], list[str]]) -> tuple[str, str]:
    """Return what is wrong with one key, and what it may be."""
    # pydantic puts a member of a union in the path, by its type: reuse.tuple[Reuse, ...].0.layer.
    loc = tuple(str(part) for part in detail["loc"] if not _UNION_MEMBER.match(str(part)))
    # pydantic puts a choice's kind in the path: ("budget", "fraction", "floor") is budget.floor.
    is_choice = len(loc) > 2 and loc[:2] in key_sets
    key = ".".join((loc[0], *loc[2:]) if is_choice else loc) or "the config"
    context: dict[str, Any] = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            parent = loc[:-1]
            owner = parent[0] if parent else "the config"
            choice = f" of kind {parent[1]}" if is_choice else ""
            allowed = "|".join(key_sets.get(parent, []))
            return f"{key} is not a key{choice}", f"the keys of {owner}{choice} {allowed}"
        case "missing":
            return f"{key} is missing", f"{key} with {_what_it_holds(loc, key_sets)}"
        case "union_tag_not_found":
            return f"{key}.kind is missing", f"{key}.kind {_kinds(loc[0], key_sets)}"
        case "model_attributes_type" | "model_type":
            return f"{key} is {shorten(repr(detail['input']))}", f"{key} an object with a kind"
        case "union_tag_invalid":
            kinds = str(context["expected_tags"]).replace("'", "").replace(", ", "|")
            return f"{key}.kind is {context['tag']!r}", f"{key}.kind {kinds}"
        case "literal_error":
            expected = str(context["expected"]).replace(" or ", ", ").replace(", ", "|")
            return f"{key} is {detail['input']!r}", f"{key} {expected.replace(chr(39), '')}"
        case _:
            rule = detail["msg"].removeprefix("Input should be ")
            return f"{key} is {shorten(repr(detail['input']))}", f"{key} {rule}"


def _kinds(axis: str, key_sets: dict[tuple[str, ...], list[str]]) -> str:
    return "|".join(path[1] for path in key_sets if len(path) == 2 and path[0] == axis)


def _what_it_holds(loc: tuple[str, ...], key_sets: dict[tuple[str, ...], list[str]]) -> str:
    kinds = _kinds(loc[0], key_sets) if len(loc) == 1 else ""
    return f"kind {kinds}" if kinds else "a value"
