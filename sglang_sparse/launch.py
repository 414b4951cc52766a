# SPDX-License-Identifier: Apache-2.0
"""The resolved configuration of a server, which every scheduler gets with its ``ServerArgs``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sglang_sparse.choices.interfaces import BoundedRetention
from sglang_sparse.config import Resolved, SparseConfig

# The underscore keeps it out of SGLang's declared fields; it survives pickling to subprocesses.
_ATTRIBUTE = "_sparse"


@dataclass(frozen=True)
class SparseLaunch:
    """Resolved flags of one server.

    Attributes:
        resolved: the validated config, the method's name, and where both came from.
        free: the most that ``placement.device_bytes`` may be if it is unset.
    """

    resolved: Resolved
    free: int = 0

    @property
    def config(self) -> SparseConfig:
        """The point on the eight axes."""
        return self.resolved.config

    def sized(self, device_bytes: int) -> SparseLaunch:
        """The same with ``placement.device_bytes``."""
        placement = self.config.placement.model_copy(update={"device_bytes": device_bytes})
        config = self.config.model_copy(update={"placement": placement})
        return replace(self, resolved=replace(self.resolved, config=config))


def attach(server_args: Any, launch: SparseLaunch) -> None:
    """Store ``launch`` on SGLang's ``ServerArgs``."""
    setattr(server_args, _ATTRIBUTE, launch)


def launch_of(server_args: Any) -> SparseLaunch | None:
    """The launch that :func:`attach` stored, or None for a dense server."""
    return getattr(server_args, _ATTRIBUTE, None)


def selecting_launch_of(server_args: Any) -> SparseLaunch | None:
    """The launch of a server whose layers select; None for any other server."""
    launch = launch_of(server_args)
    return None if launch is None or launch.config.retention.bounded else launch


def bounded_of(server_args: Any) -> BoundedRetention | None:
    """The retention of a server that holds a bounded number of tokens a request, else None."""
    launch = launch_of(server_args)
    retention = None if launch is None else launch.config.retention
    return retention if isinstance(retention, BoundedRetention) else None


def windowed_launch_of(server_args: Any) -> SparseLaunch | None:
    """The launch of a server whose streaming heads hold windows only; None for any other."""
    launch = launch_of(server_args)
    return launch if launch is not None and launch.config.retention.by_head else None


def placed_launch_of(server_args: Any) -> SparseLaunch | None:
    """The launch of a server whose KV lies in host memory; None for any other."""
    launch = launch_of(server_args)
    return launch if launch is not None and launch.config.placement.on_host else None
