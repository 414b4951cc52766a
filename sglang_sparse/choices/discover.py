# SPDX-License-Identifier: Apache-2.0
"""Finds the choices of an axis, which are the files of its folder. No list of them exists."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any, Union

from pydantic import Field

from sglang_sparse.choices.choice import Choice


def choices_of(axis: str, base: type[Choice]) -> tuple[type[Choice], ...]:
    """Every choice of an axis, in the order of their files.

    Args:
        axis: name of the axis and of its folder in this package.
        base: base class of its choices.
    """
    package = import_module(f"sglang_sparse.choices.{axis}")
    found: list[type[Choice]] = []
    for module in iter_modules(package.__path__, f"{package.__name__}."):
        members = vars(import_module(module.name)).values()
        found += [
            member
            for member in members
            if isinstance(member, type)
            and issubclass(member, base)
            and member.__module__ == module.name
            and isinstance(member.model_fields["kind"].default, str)
        ]
    return tuple(found)


def union_of(axis: str, base: type[Choice]) -> Any:
    """The type of a config's field: any choice of the axis, told apart by its `kind`."""
    return Annotated[Union[choices_of(axis, base)], Field(discriminator="kind")]  # noqa: UP007
