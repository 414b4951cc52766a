# SPDX-License-Identifier: Apache-2.0
"""The base of every choice: a small frozen model of its keys, whose `kind` names it."""

from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict

PageSize = Literal[16, 32, 64]
# Counts travel in int32 and are added up there; no context comes near this.
MAX_COUNT = 2**24
MILLION = 1_000_000


class InvalidConfig(ValueError):
    """A broken rule between keys; becomes a `ConfigError` where the flag is known."""

    def __init__(self, problem: str, *, allowed: str, remedy: str):
        self.problem = problem
        self.allowed = allowed
        self.remedy = remedy
        super().__init__(f"{problem}; allowed: {allowed}; {remedy}")


class Choice(BaseModel):
    """Base of every choice: immutable, unknown keys refused, no silent type conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelShape(Protocol):
    """The properties of the served model that a choice may read."""

    @property
    def name(self) -> str: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def num_key_value_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    def describe(self) -> str:
        """The shape in words, for messages."""


def check_at_least(key: str, value: float | None, base_key: str, base: float) -> None:
    """Raise `InvalidConfig` if `value`, of `key`, is below `base`, the value of `base_key`."""
    if value is not None and value < base:
        raise InvalidConfig(
            f"{key} {value} is below {base_key} {base}",
            allowed=f"{key} of at least {base}, or null",
            remedy=f"raise {key}, or lower {base_key}",
        )
