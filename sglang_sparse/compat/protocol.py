# SPDX-License-Identifier: Apache-2.0
"""The interface of a module for a version of SGLang."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from sglang_sparse.graph_variants import Variant
    from sglang_sparse_radix.radix_cache import SparseRadixCache

HookKind = Literal["around", "after"]


@dataclass(frozen=True)
class Hook:
    """A function of this package that runs around or after a function of SGLang.

    Attributes:
        target: dotted name of SGLang's function.
        function: this package's function as ``module:function``. It is named, not imported, since
            its module imports this package.
        kind: where it runs, in the terms of SGLang's ``HookType``.
    """

    target: str
    function: str
    kind: HookKind

    def load(self) -> Callable[..., Any]:
        """Import and return this package's function."""
        found: Callable[..., Any] = pkgutil.resolve_name(self.function)
        return found


class SGLangVersion(Protocol):
    """The differences between versions of SGLang; a module of this shape covers each version.

    Importing such a module imports nothing of SGLang, since it is needed while SGLang loads.
    """

    @property
    def HOOKS(self) -> tuple[Hook, ...]:
        """Every hook; the signature of its target is recorded, see :mod:`.signatures`."""

    @property
    def SEAMS(self) -> tuple[str, ...]:
        """Dotted names of what is called or overridden beside the hooks; recorded likewise."""

    @property
    def MARKER(self) -> str:
        """A file of SGLang's package that came with what the version does differently."""

    @property
    def SHARES_STATES(self) -> bool:
        """Whether requests may begin with the state of a prefix, under a bounded retention."""

    @property
    def PLACES_ON_HOST(self) -> bool:
        """Whether the KV pool may lie in host memory, with frames on the device."""

    @property
    def READS_KV_SCALES(self) -> frozenset[str]:
        """Dense backends whose passes all read fp8 rows by their layer's scales."""

    @property
    def WINDOW_CORES(self) -> frozenset[str]:
        """Cores of SGLang's tree of two pools that a server may name and that take our rules."""

    @property
    def WAITS_FOR_WHOLE_CHUNKS(self) -> bool:
        """Whether a prompt waits until the pool of windows has room for a chunk of it, whole."""

    @property
    def CPU_PLATFORM(self) -> str:
        """Dotted name of the platform class that serves where no accelerator is."""

    def request_row(self, req: Any) -> int:
        """Row of a scheduled request in SGLang's request table."""

    def prefilled(self, req: Any) -> int:
        """Tokens up to which a request's last prefill chunk went."""

    def resolved(self, server_args: Any) -> Any:
        """Flags as SGLang resolves them, readable by name; resolves them if nobody did yet."""

    def declared_defaults(self) -> dict[str, Any]:
        """Every field of ``ServerArgs`` with its default; None for one without."""

    def tree_class(self) -> type[SparseRadixCache]:
        """SGLang's radix cache with branches and counts of reused planes."""

    def hierarchical_tree_class(self) -> type[SparseRadixCache] | None:
        """The same over SGLang's hierarchical cache; None where that is not tested."""

    def window_tree_class(self) -> type[Any]:
        """SGLang's tree of two pools, with sinks."""

    def variant_being_captured(self) -> Variant:
        """Which decode graph SGLang captures at this moment."""

    def workers_application(self, name: str) -> AbstractContextManager[None]:
        """Inside it, SGLang starts tokenizer processes with the application ``module:name``."""

    def prepare_draft_worker(self) -> None:
        """Make SGLang's draft workers run where no accelerator is."""
