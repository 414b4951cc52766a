# SPDX-License-Identifier: Apache-2.0
"""Signatures of SGLang's functions that this package hooks, calls or overrides.

They are recorded for each tested version in ``sglang_sparse/compat/VERSION/signatures.json``.
A test compares the record with the installed SGLang, and a start on a version that is not tested
names what differs. ``python -m sglang_sparse.compat`` prints those of the installed
version, in the format of the record.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import cast

from sglang_sparse.compat.protocol import SGLangVersion


def signature_of(target: str) -> str:
    """Parameters of a function of SGLang, by its dotted name, without annotations.

    A hook that is applied does not show: ``functools.wraps`` leads to the original.

    Raises:
        AttributeError, ImportError: this SGLang has no such function.
    """
    owner, name = target.rsplit(".", 1)
    found = inspect.getattr_static(pkgutil.resolve_name(owner), name)
    function = getattr(found, "__func__", found)  # of a static or class method
    bare = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in bare.parameters.values()]
    text = str(inspect.Signature(parameters))[1:-1]
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # where a default lies in memory


def recorded(version: SGLangVersion) -> dict[str, str]:
    """The recorded signatures of a version by dotted name."""
    folder = Path(str(cast("ModuleType", version).__file__)).parent
    record: dict[str, str] = json.loads((folder / "signatures.json").read_text())
    return record


def installed(version: SGLangVersion) -> dict[str, str]:
    """Signatures that the installed SGLang has for the hooks and seams of a version.

    A function that it does not have is left out.
    """
    found = {}
    for target in sorted({hook.target for hook in version.HOOKS} | set(version.SEAMS)):
        try:
            found[target] = signature_of(target)
        except (AttributeError, ImportError):
            continue
    return found


def differences(version: SGLangVersion) -> list[str]:
    """Dotted names whose signature in the installed SGLang is not the recorded one."""
    now = installed(version)
    return sorted(name for name, shape in recorded(version).items() if now.get(name) != shape)
