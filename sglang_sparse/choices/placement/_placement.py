# SPDX-License-Identifier: Apache-2.0
"""What the axis `placement` asks of its choices."""

from abc import ABC
from typing import ClassVar, Protocol

from sglang_sparse.choices.choice import Choice, ModelShape
from sglang_sparse.choices.interfaces import Point, RetentionChoice


class PlacedPoint(Point, Protocol):
    """The parts of a config that a placement may read."""

    @property
    def retention(self) -> RetentionChoice: ...


class PlacementChoice(Choice, ABC):
    """Where keys and values lie.

    Attributes:
        on_host: in host memory, with frames on the device for what steps attend to.
    """

    kind: str
    on_host: ClassVar[bool] = False

    @property
    def room(self) -> tuple[int, int]:
        """Device bytes (0: unset) and host bytes for keys and values in host memory."""
        return (0, 0)

    def check(self, point: PlacedPoint) -> None:
        """Refuse, with `InvalidConfig`, a config that this placement cannot be part of."""

    def check_model(self, point: PlacedPoint, model: ModelShape) -> None:
        """Refuse, with `InvalidConfig`, a model of which `point` cannot place KV like that."""

    def check_request(self, *, dense: bool) -> None:
        """Refuse, with `InvalidConfig`, what a request asks for and this cannot give."""
