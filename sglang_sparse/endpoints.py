# SPDX-License-Identifier: Apache-2.0
"""Carries ``custom_params`` of endpoints that do not pass them to SGLang's sampling parameters.

Anthropic's ``/v1/messages``, OpenAI's ``/v1/responses`` and Ollama's ``/api/chat`` and
``/api/generate`` are protocols without ``custom_params``, and SGLang drops fields that it does not
know. This module reads the field from the body, checks it, and puts it into the sampling parameters
that SGLang makes of the request. ``--preferred-sampling-params`` reach only some endpoints, so they
may not hold it.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from sglang_sparse.config import ConfigError
from sglang_sparse.launch import launch_of
from sglang_sparse.request_options import KEY, PARAMS, parse

_PREFERRED = "--preferred-sampling-params"
# ``custom_params`` of the request that this task handles. SGLang makes its sampling parameters in
# the same task.
_asked: ContextVar[Mapping[str, Any] | None] = ContextVar("custom_params", default=None)


async def carry_custom_params(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any = None
) -> Any:
    """AROUND hook on the handlers of endpoints that drop ``custom_params``.

    Args:
        original: the handler.
        serving: SGLang's object that it belongs to.
        request: the parsed body, without fields that the protocol lacks.
        raw_request: the HTTP request, whose body SGLang has read.

    Raises:
        HTTPException: 400, before a stream's status is sent, with the line of
            :class:`ConfigError`.
    """
    from fastapi import HTTPException

    manager = getattr(serving, "openai_serving_chat", serving).tokenizer_manager
    launch = launch_of(manager.server_args)
    if launch is None or raw_request is None:
        return await original(serving, request, raw_request)
    params = (await raw_request.json()).get(PARAMS)
    try:
        parse(params, launch.config)
    except ConfigError as error:
        raise HTTPException(400, str(error)) from None
    token = _asked.set(params)
    try:
        return await original(serving, request, raw_request)
    finally:
        _asked.reset(token)


def into_chat_request(result: Any, *args: Any) -> Any:
    """AFTER hook on ``AnthropicServing._convert_to_chat_completion_request``."""
    if _asked.get() is not None:
        result.custom_params = _asked.get()
    return result


def into_sampling_params(result: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """AFTER hook on what makes the sampling parameters of Responses and Ollama requests."""
    if _asked.get() is not None:
        result[PARAMS] = _asked.get()
    return result


def check_preferred(value: str | Mapping[str, Any] | None) -> None:
    """Check ``--preferred-sampling-params``.

    OpenAI's endpoints always send ``custom_params`` and so override a preference, but ``/generate``
    uses it. So a default for all requests belongs into the config, not into a preference.

    Args:
        value: JSON text, or the parsed value.

    Raises:
        ConfigError: it is not an object, or its ``custom_params`` are not one or hold ``sparse``.
    """
    problem = None
    try:
        params = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        params, problem = None, f"not JSON: {error}"
    if params is not None and not isinstance(params, Mapping):
        problem = "not an object"
    custom = params.get(PARAMS) if isinstance(params, Mapping) else None
    if custom is not None and not isinstance(custom, Mapping):
        problem = f"{PARAMS} is not an object"
    elif custom is not None and KEY in custom:
        problem = f"{PARAMS}.{KEY} would hold for some endpoints and not for others"
    if problem is not None:
        raise ConfigError(
            flag=_PREFERRED,
            value=str(value),
            problem=problem,
            allowed=f"a JSON object without {PARAMS}.{KEY}",
            remedy="set the server's budget in --sparse-config, or let requests ask for their own",
        )
