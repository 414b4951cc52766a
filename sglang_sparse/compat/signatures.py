# SPDX-License-Identifier: Apache-2.0
"""Signatures of SGLang's functions that this package hooks, calls or overrides.

They are recorded in ``sglang_sparse/compat/signatures.json``: one signature for all tested versions
that have the function, or one by version. A test compares the record with the installed SGLang, and
a start on a version that is not tested names what differs. ``python -m sglang_sparse.compat``
records those of the installed version.
"""

import inspect
import json
import pkgutil
import re
from pathlib import Path

from sglang_sparse.compat.protocol import SGLangVersion

RECORD = Path(__file__).with_name("signatures.json")
Record = dict[str, str | dict[str, str]]


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


def targets(version: SGLangVersion) -> list[str]:
    """Dotted names of a version's hooks and seams."""
    return sorted({hook.target for hook in version.HOOKS} | set(version.SEAMS))


def _label(version: SGLangVersion) -> str:
    return str(vars(version)["__name__"]).rsplit(".", 1)[1]


def recorded(version: SGLangVersion) -> dict[str, str]:
    """The recorded signatures of a version by dotted name."""
    record: Record = json.loads(RECORD.read_text())
    found = {}
    for target in targets(version):
        shape = record.get(target, {})
        if isinstance(shape, dict):
            if _label(version) not in shape:
                continue
            shape = shape[_label(version)]
        found[target] = shape
    return found


def installed(version: SGLangVersion) -> dict[str, str]:
    """Signatures that the installed SGLang has for the hooks and seams of a version.

    A function that it does not have is left out.
    """
    found = {}
    for target in targets(version):
        try:
            found[target] = signature_of(target)
        except (AttributeError, ImportError):
            continue
    return found


def differences(version: SGLangVersion) -> list[str]:
    """Dotted names whose signature in the installed SGLang is not the recorded one."""
    now = installed(version)
    return sorted(name for name, shape in recorded(version).items() if now.get(name) != shape)


def merged(shapes: dict[str, dict[str, str]]) -> Record:
    """The record of ``shapes``, signatures of versions by their module's name."""
    record: Record = {}
    for target in sorted({name for own in shapes.values() for name in own}):
        by_version = {label: own[target] for label, own in shapes.items() if target in own}
        alike = len({*by_version.values()}) == 1
        record[target] = next(iter(by_version.values())) if alike else by_version
    return record


def write(version: SGLangVersion, others: tuple[SGLangVersion, ...]) -> None:
    """Record the installed SGLang's signatures as those of ``version``; ``others`` keep theirs."""
    shapes = {_label(one): recorded(one) for one in others} | {_label(version): installed(version)}
    RECORD.write_text(json.dumps(merged(dict(sorted(shapes.items()))), indent=1) + "\n")
