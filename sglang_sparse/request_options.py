# SPDX-License-Identifier: Apache-2.0
"""The options of a request: ``custom_params: {"sparse": {...}}``.

======================  ==========================================================================
``{"mode": "dense"}``   attend to everything, as a dense server would
``{"budget": 512}``     another budget, in the unit of the server's own: tokens, or a share of the
                        context; within limits that the server sets
======================  ==========================================================================

Requests are checked in the process that receives them, before they are scheduled. A bad request is
answered with status 400 and does not affect any other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from sglang_sparse.choices.choice import Choice, InvalidConfig
from sglang_sparse.choices.interfaces import BudgetChoice
from sglang_sparse.config import ConfigError, SparseConfig
from sglang_sparse.config.errors import shorten
from sglang_sparse.launch import launch_of
from sglang_sparse.speculation.requests import check_greedy

PARAMS = "custom_params"
KEY = "sparse"
_WHERE = f"{PARAMS}.{KEY}"


@dataclass(frozen=True)
class RequestOptions:
    """The options that a request gave.

    Attributes:
        dense: attend to everything.
        budget: its own budget, or None for the server's.
    """

    dense: bool = False
    budget: BudgetChoice | None = None


DEFAULT = RequestOptions()


class _Asked(Choice):
    """The keys of ``custom_params.sparse``."""

    mode: Literal["sparse", "dense"] = "sparse"
    budget: int | float | None = None


def parse(custom_params: object, config: SparseConfig) -> RequestOptions:
    """Options of one request.

    Args:
        custom_params: SGLang's ``sampling_params.custom_params``, as the client sent it.
        config: the server's configuration.

    Raises:
        ConfigError: one line that names the key, its value and the allowed range.
    """
    if custom_params is None:
        return DEFAULT
    if not isinstance(custom_params, Mapping):
        raise _refused(PARAMS, custom_params, "not an object", "an object, or nothing")
    if KEY not in custom_params:
        return DEFAULT
    try:
        asked = _Asked.model_validate(custom_params[KEY])
    except ValidationError as error:
        raise _wrong_shape(error, custom_params[KEY], config) from None
    try:
        config.retention.check_request(dense=asked.mode == "dense", budget=asked.budget)
        config.placement.check_request(dense=asked.mode == "dense")
    except InvalidConfig as error:
        what = ("mode", asked.mode) if asked.mode == "dense" else ("budget", asked.budget)
        raise _refused(
            f"{_WHERE}.{what[0]}", what[1], error.problem, error.allowed, error.remedy
        ) from None
    if asked.mode == "dense":
        if asked.budget is not None:
            raise _refused(
                f"{_WHERE}.budget", asked.budget, "a dense request has none", "mode sparse"
            )
        return RequestOptions(dense=True)
    if asked.budget is None:
        return DEFAULT
    _check_range(asked.budget, config)
    return RequestOptions(budget=config.budget.asked(asked.budget))


def _range_text(config: SparseConfig) -> str:
    low, high = config.request_range
    text = f"{low:g} to {high:g}" if isinstance(high, float) else f"{low} to {high}"
    return f"{text} ({config.budget.key})"


def _allowed(config: SparseConfig) -> str:
    return f"mode sparse or dense, or a budget of {_range_text(config)}"


def _check_range(budget: float, config: SparseConfig) -> None:
    low, high = config.request_range
    problem, remedy = "outside of what this server allows", "correct the request"
    if isinstance(high, int) and not isinstance(budget, int):
        problem = "not a whole number"
    elif budget > high:
        remedy = f"ask for less, or serve with a larger budget.max_{config.budget.key}"
    elif budget >= low:
        return
    raise _refused(f"{_WHERE}.budget", budget, problem, _range_text(config), remedy)


def _wrong_shape(error: ValidationError, value: object, config: SparseConfig) -> ConfigError:
    detail = error.errors(include_url=False)[0]
    if not detail["loc"]:
        return _refused(_WHERE, value, "not an object", _allowed(config))
    key = shorten(str(detail["loc"][0]))
    unknown = detail["type"] == "extra_forbidden"
    problem = "not a key" if unknown else "of the wrong type or value"
    return _refused(f"{_WHERE}.{key}", detail["input"], problem, _allowed(config))


def _refused(
    where: str, value: object, problem: str, allowed: str, remedy: str = "correct the request"
) -> ConfigError:
    return ConfigError(
        flag=where, value=str(value), problem=problem, allowed=allowed, remedy=remedy
    )


def validate_one_request(
    original: Callable[..., None], manager: Any, obj: Any, input_ids: Any
) -> None:
    """AROUND hook on ``TokenizerManager._validate_one_request``; its ValueError is a 400."""
    launch = launch_of(manager.server_args)
    if launch is not None:
        _check_params(obj.sampling_params, launch.config, manager.server_args)
    original(manager, obj, input_ids)


def check_before_streaming(original: Callable[..., Any], manager: Any, obj: Any) -> Any:
    """AROUND hook on ``TokenizerManager.create_abort_task``, which ``/generate`` calls for a
    stream before its status is sent; the check above would come after a 200.

    Raises:
        HTTPException: 400, with the line of :class:`ConfigError`.
    """
    from fastapi import HTTPException

    launch = launch_of(manager.server_args)
    if launch is not None:
        params = getattr(obj, "sampling_params", None)
        try:
            for one in params if isinstance(params, list) else [params]:
                _check_params(one, launch.config, manager.server_args)
        except ConfigError as error:
            raise HTTPException(400, str(error)) from None
    return original(manager, obj)


def _check_params(sampling_params: object, config: SparseConfig, server_args: Any) -> None:
    params = sampling_params if isinstance(sampling_params, Mapping) else {}
    parse(params.get(PARAMS), config)
    check_greedy(params, server_args)
