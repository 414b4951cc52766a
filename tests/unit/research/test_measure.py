# SPDX-License-Identifier: Apache-2.0
"""All studies are run once each, side by side, and what they found lands in the repository."""

import gzip
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_sparse.config import configs_dir
from sglang_sparse.research import arguments, publish
from sglang_sparse.research.measure import JOBS, Job, begin_presets, run
from sglang_sparse.research.tables import cells_of, from_columns

SOURCE = {"device": "NVIDIA H200", "commit": "abc1234"}


def _run(jobs: list[Job], out: Path, slots: list[str]) -> list[str]:
    return run(jobs, model=Path("model"), corpus=Path("corpus"), out=out, slots=slots)


def test_a_study_that_ended_is_not_run_again_and_one_that_failed_is(tmp_path: Path) -> None:
    good = Job("good", "json.tool", "{out}/in.json {out}/good.json")
    bad = Job("bad", "json.tool", "{out}/none.json")
    (tmp_path / "in.json").write_text("[1]")
    assert _run([bad, good], tmp_path, ["", ""]) == ["bad"]
    assert json.loads((tmp_path / "good.json").read_text()) == [1]
    assert "none.json" in (tmp_path / "bad.log").read_text()
    (tmp_path / "good.json").unlink()
    (tmp_path / "none.json").write_text("[2]")
    assert _run([bad, good], tmp_path, [""]) == []
    assert not (tmp_path / "good.json").exists()


def test_calibrations_begin_with_the_shipped_presets_and_write_where_these_lie(
    tmp_path: Path,
) -> None:
    (tmp_path / "lserve.json").write_text("found already")
    begin_presets(tmp_path)
    shipped = configs_dir() / "reference" / "kascade.json"
    assert (tmp_path / "kascade.json").read_bytes() == shipped.read_bytes()
    assert (tmp_path / "lserve.json").read_text() == "found already"
    for preset in tmp_path.iterdir():
        (job,) = (job for job in JOBS if job.name == preset.stem)
        assert f"--output {{out}}/{preset.name} " in job.arguments


def test_each_process_sees_the_gpu_of_its_slot(tmp_path: Path) -> None:
    package = tmp_path / "seen"
    package.mkdir()
    (package / "gpu.py").write_text(
        "import os, sys, time\n"
        "open(sys.argv[1], 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "time.sleep(0.5)\n"
    )
    jobs = [Job(f"job{i}", "seen.gpu", f"{{out}}/gpu{i}") for i in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        assert _run(jobs, tmp_path, ["0", "1"]) == []
    seen = [(tmp_path / f"gpu{i}").read_text() for i in range(4)]
    assert sorted(seen) == ["0", "0", "1", "1"]


def test_every_job_names_a_module_and_a_file_of_its_own() -> None:
    assert len({job.name for job in JOBS}) == len(JOBS)
    for job in JOBS:
        command = job.command(Path("M"), Path("C"), Path("O"))
        assert importlib.import_module(command[2]).main
        assert "{" not in " ".join(command[3:])
        assert command[command.index("--model") + 1] == "M"
        own = inspect.getsource(importlib.import_module(command[2]))
        shared = inspect.getsource(arguments)
        for flag in (part for part in command if part.startswith("--")):
            named = (f'"{flag}"', f"{flag[2:].replace('-', '_')}: ")  # of argparse, of typer
            assert any(name in own + shared for name in named), flag
    published = {study for study, _ in publish.FILES.values()} | {"text"}
    calibrated = {"kascade", "lserve", "gates"}
    shipped = {job.name for job in JOBS if job.name.startswith("shipped_")}
    assert {job.name for job in JOBS} == published | calibrated | shipped


def _cell(task: str, **more: Any) -> dict[str, Any]:
    return {"task": task, "exact": 0.5, "policy": {"kind": "dense"}, **more}


def test_results_land_by_columns_with_device_and_commit(tmp_path: Path) -> None:
    studies, reference = tmp_path / "studies", tmp_path / "reference"
    for folder in ("model/study", "psa-report/presets"):
        (reference / folder).mkdir(parents=True)
    studies.mkdir()
    found: dict[str, dict[str, Any]] = {
        "table_4k": {"count": 2, "seed": 1, "cells": [_cell("a"), _cell("b")]},
        "ablation_4k": {"count": 2, "cells": [], "ablation": {"length": 4096}},
        "presets": {"rows": {"psa": {"cells": [{"task": "a", "exact": 1.0}] * 2}}},
        "text": {"whole": 1.1},
    }
    for i, length in enumerate(("4k", "8k", "16k", "32k")):
        cells = [_cell("a", length=i, preset="psa")]
        found[f"shipped_{length}"] = {"count": i, "seed": 1, "split": "heldout", "cells": cells}
    for name, table in found.items():
        (studies / f"{name}.json").write_text(json.dumps(table))
    (studies / "presets.md").write_text("| |\n")
    old, kept = (reference / "model" / "study" / n for n in ("text-old.json", "training.json"))
    old.touch(), kept.touch()
    written = publish.publish(studies, reference, SOURCE)
    assert len(written) == len(set(written)) == 6

    def stored(name: str) -> dict[str, Any]:
        raw = (reference / name).read_bytes()
        table: dict[str, Any] = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)
        assert SOURCE.items() <= table.items()
        return table

    assert cells_of(stored("model/study/table_4k.json.gz")) == found["table_4k"]["cells"]
    shipped = stored("model/study/shipped.json.gz")
    assert [cell["length"] for cell in cells_of(shipped)] == [0, 1, 2, 3]
    assert "count" not in shipped
    assert stored("model/study/ablation_4k.json")["ablation"] == {"length": 4096}
    assert (
        from_columns(stored("psa-report/presets/presets.json.gz"))["rows"]
        == found["presets"]["rows"]
    )
    assert (reference / "psa-report" / "presets" / "table.md").read_text() == "| |\n"
    assert stored("model/study/text-abc1234.json")["whole"] == 1.1
    assert not old.exists()
    assert kept.exists()
    before = (reference / "model/study/shipped.json.gz").read_bytes()
    publish.publish(studies, reference, SOURCE)
    assert (reference / "model/study/shipped.json.gz").read_bytes() == before


def test_numbers_are_stored_with_as_many_decimals_as_tell_something(tmp_path: Path) -> None:
    publish.write(tmp_path / "a.json", {"rows": [[1 / 3, 7, "x"], {"whole": 2.0}], "none": None})
    stored = {"rows": [[0.333333333333, 7, "x"], {"whole": 2.0}], "none": None}
    assert json.loads((tmp_path / "a.json").read_text()) == stored


def test_results_of_other_seeds_are_not_joined() -> None:
    tables = [{"seed": seed, "split": "heldout", "cells": []} for seed in (1, 2)]
    with pytest.raises(ValueError, match="different seeds"):
        publish.joined(tables)
