# SPDX-License-Identifier: Apache-2.0
"""Free host memory is what the machine and every control group around the process have left."""

from pathlib import Path

import psutil
import pytest

from sglang_sparse.host_memory import free_host_bytes

TB = 1 << 40


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with much memory."""
    free = psutil.virtual_memory()._replace(available=TB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)


def group(folder: Path, names: tuple[str, str, str], limit: str, used: int, cache: int) -> None:
    """The files of one control group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


SECOND = ("memory.max", "memory.current", "inactive_file")
FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize(
    ("names", "top", "line"), [(SECOND, "", "0::"), (FIRST, "memory", "9:cpu,memory:")]
)
def test_the_least_that_any_group_around_the_process_has_left_counts(
    tmp_path: Path, names: tuple[str, str, str], top: str, line: str
) -> None:
    own, mount = tmp_path / "own", tmp_path / "mount"
    own.write_text(f"3:devices:/other\n{line}/outer/inner\n")
    assert free_host_bytes(mount, own) == TB  # nothing is mounted
    group(mount / top / "outer" / "inner", names, "9000", 4000, 500)
    assert free_host_bytes(mount, own) == 5500
    group(mount / top / "outer", names, "7000", 4000, 100)
    assert free_host_bytes(mount, own) == 3100
    group(mount / top / "other", names, "10", 5, 0)  # of other processes
    assert free_host_bytes(mount, own) == 3100
    group(mount / top, names, "1000", 4000, 0)
    assert free_host_bytes(mount, own) == 0


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    own, mount = tmp_path / "own", tmp_path / "mount"
    own.write_text("0::/kubepods/pod1/container\n")
    group(mount, SECOND, "8000", 3000, 0)
    assert free_host_bytes(mount, own) == 5000


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    own, mount = tmp_path / "own", tmp_path / "mount"
    assert free_host_bytes(mount, own) == TB
    own.write_text("0::/\n")
    group(mount, SECOND, "max", 3000, 0)
    assert free_host_bytes(mount, own) == TB
