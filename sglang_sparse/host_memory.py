# SPDX-License-Identifier: Apache-2.0
"""How much host memory this process may still take: of the machine, and of its container."""

from collections.abc import Iterator
from pathlib import Path

_MOUNT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# By the version of control groups: limit, what is used, and what of that a file cache gives back.
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_host_bytes(mount: Path = _MOUNT, own: Path = _OWN) -> int:
    """Bytes that are free on the machine and below the limits of all control groups around us.

    A container's limit is not in the machine's numbers, and memory above it ends the process
    without a word.

    Args:
        mount: where control groups of version 1 or 2 are mounted.
        own: the file that says which of them this process is in.
    """
    import psutil

    return min([int(psutil.virtual_memory().available), *_left(mount, own)])


def _left(mount: Path, own: Path) -> Iterator[int]:
    """Bytes below each limit that there is."""
    lines = own.read_text().splitlines() if own.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        for name in {*controllers.split(",")} & _FILES.keys():
            top = mount / name
            group = top / path.lstrip("/")
            # In a container the path may be the host's, of which it sees the last part alone.
            for folder in {top, group, *group.parents}:
                if top in (folder, *folder.parents):
                    yield from _below(folder, *_FILES[name])


def _below(folder: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    try:
        most, now = ((folder / name).read_text().strip() for name in (limit, used))
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return
    if most != "max":
        yield max(0, int(most) - int(now) + int(counts.get(cache, 0)))
