# SPDX-License-Identifier: Apache-2.0
"""The runner of the GPU checks: what it counts, what fails, what its report says."""

import gzip
import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import scripts

from sglang_sparse.config import load_preset, resolve

import gpu_check  # isort: skip
import rank_questions  # isort: skip
import served_checks  # isort: skip
from served_checks import EQUAL, SELECTED, Answer, Outcome, compare

KERNEL_TESTS = """
import pytest

def test_right():
    pass

def test_wrong():
    assert 1 == 2, "one is not two"

@pytest.mark.skip
def test_elsewhere():
    pass
"""


def checked(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit status of the command line."""
    monkeypatch.setattr(gpu_check, "prepare", lambda: None)  # no server is started here
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert isinstance(ended.value.code, int), ended.value.code
    return ended.value.code


def test_failing_kernel_tests_are_counted_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path, out = tmp_path / "test_kernels.py", tmp_path / "report" / "gpu.json"
    path.write_text(KERNEL_TESTS)
    line = ["--parts", "kernels", "--kernel-tests", str(path), "--out", str(out)]
    assert checked(line, monkeypatch) == 1
    report = json.loads(out.read_text())
    assert report["ok"] is False
    assert report["asked"] == ["kernels"]
    assert report["commit"]
    assert report["versions"]["sglang"] == version("sglang")
    assert report["versions"]["torch"]
    found = report["parts"]["kernels"]
    assert (found["ok"], found["checked"], found["failed"], found["skipped"]) == (False, 2, 1, 1)
    (failure,) = found["failures"]
    assert "test_wrong" in failure
    assert "one is not two" in failure
    assert found["compiled"] is gpu_check.has_gpu()
    assert "kernels: FAILED, 2 checked, 1 failed" in capsys.readouterr().out
    path.write_text(KERNEL_TESTS.replace("1 == 2", "1 == 1"))
    assert checked(line, monkeypatch) == 0
    assert json.loads(out.read_text())["ok"] is True
    # Nothing checked is nothing shown.
    path.write_text("def broken(:\n")
    assert checked(line, monkeypatch) == 1
    path.unlink()
    assert checked(line, monkeypatch) == 1


def test_kernel_tests_are_shared_out_to_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "kernels", tmp_path / "report" / "gpu.json"
    folder.mkdir()
    for number in range(3):
        (folder / f"test_kernels_{number}.py").write_text(KERNEL_TESTS)
    line = ["--parts", "kernels", "--kernel-tests", str(folder), "--out", str(out)]
    assert checked([*line, "--workers", "2"], monkeypatch) == 1
    found = json.loads(out.read_text())["parts"]["kernels"]
    assert (found["checked"], found["failed"], found["skipped"]) == (6, 3, 3)
    assert (len(found["failures"]), len(found["skipped_tests"])) == (3, 3)
    assert {path.name for path in out.parent.glob("*.log")} == {"kernels-0.log", "kernels-1.log"}


def test_a_part_that_breaks_fails_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*args: Any) -> Any:
        raise RuntimeError("the server did not start")

    monkeypatch.setattr(gpu_check, "PARTS", {
        "kernels": breaks, "soak": lambda *args: gpu_check.part(3, []),
    })  # fmt: skip
    out = tmp_path / "gpu.json"
    for more in ([], ["--devices", "0,1"]):
        line = ["--parts", "kernels,soak", "--out", str(out), *more]
        assert checked(line, monkeypatch) == 1
        parts = json.loads(out.read_text())["parts"]
        assert parts["kernels"]["failures"] == ["RuntimeError: the server did not start"]
        assert parts["soak"]["ok"] is True


def test_parts_run_with_the_device_that_each_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}

    def note(name: str) -> Any:
        def run(args: Any, environment: dict[str, str]) -> Any:
            seen[name] = environment
            return gpu_check.part(1, [])

        return run

    monkeypatch.setattr(gpu_check, "PARTS", {name: note(name) for name in ("kernels", "soak")})
    line = ["--parts", "kernels,soak", "--devices", "2,5", "--out", str(tmp_path / "gpu.json")]
    assert checked(line, monkeypatch) == 0
    assert seen == {
        "kernels": {"CUDA_VISIBLE_DEVICES": "2"}, "soak": {"CUDA_VISIBLE_DEVICES": "5"}
    }  # fmt: skip


def soak_outcome(**changes: Any) -> dict[str, Any]:
    return {
        "ok": True, "method": "sparcas", "requests": {"answered": 9}, "faults": [],
        "bad_log_lines": [], "alive": True, "planes": {"pages": 4, "wrong": 0},
        "rss_growth_mib": 1.0, "rss_mib": [1.0],
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"ok": False, "planes": {"pages": 4, "wrong": 2}}, ["'wrong': 2"]),
        ({"ok": False, "faults": ["answered: died"]}, ["answered: died"]),
        ({"ok": False, "rss_growth_mib": 99.0}, ["99.0"]),
        ({"ok": False, "slots": {"all": 8, "free": 7}}, ["'free': 7"]),
    ],
)
def test_a_soak_that_went_wrong_is_listed(
    changes: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import contextlib

    @contextlib.contextmanager
    def servers(*args: Any, **options: Any) -> Any:
        yield {"sparcas": None}

    monkeypatch.setattr(gpu_check, "local_servers", servers)
    monkeypatch.setattr(gpu_check.soak, "soak", lambda *a, **o: soak_outcome(**changes))
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "x.json")])
    found = gpu_check.soaked(gpu_check.parse(), {})
    assert found["ok"] is not words or not words
    assert found["failed"] == len(words)
    assert found["checked"] == 9
    for word, failure in zip(words, found["failures"], strict=True):
        assert word in failure


def report_of(tmp_path: Path, name: str, ok: bool = True, **changes: Any) -> Path:
    content = {
        "commit": "abc", "modified": None, "device": "NVIDIA H200", "driver": "1",
        "versions": {"sglang": "0.5.17"}, "asked": [name],
        "parts": {name: gpu_check.part(5, [] if ok else ["one"])},
    } | changes  # fmt: skip
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(content))
    return path


def test_reports_of_single_parts_become_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "all.json"
    paths = [str(report_of(tmp_path, name)) for name in ("kernels", "served", "soak")]
    line = ["--out", str(out), "--merge", *paths]
    assert checked(line, monkeypatch) == 0
    merged = json.loads(out.read_text())
    assert merged["asked"] == list(merged["parts"]) == ["kernels", "served", "soak"]
    assert merged["ok"] is True
    report_of(tmp_path, "served", ok=False)
    assert checked(line, monkeypatch) == 1
    report_of(tmp_path, "served", parts={})  # ended before its part did
    assert checked(line, monkeypatch) == 1
    report_of(tmp_path, "served", commit="def")
    monkeypatch.setattr(sys, "argv", ["gpu", *line])
    with pytest.raises(SystemExit, match=r"served\.json: commit is def, not abc"):
        gpu_check.main()
    monkeypatch.setattr(sys, "argv", ["gpu", *line[:3], paths[0], paths[0]])
    with pytest.raises(SystemExit, match="kernels is in an earlier report too"):
        gpu_check.main()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--parts kernels,nothing",
            "'kernels,nothing' is not some of kernels, served, prompts, drafts, cascade, placed",
        ),
        ("--methods quest", "'quest' is not some of sparcas"),
        ("--parts kernels,soak --devices 0", "--devices: 2 parts need as many devices"),
    ],
)
def test_wrong_arguments_end_with_one_line(
    line: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert checked(line.split(), monkeypatch) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def an_answer(tokens: list[int], second: float = -3.0) -> Answer:
    """Each token at -0.1, token 99 at `second`."""
    return Answer(tokens, [-0.1] * len(tokens), [{t: -0.1, 99: second} for t in tokens])


def failures(want: Answer, got: Answer, noise: float = 0.0, **options: Any) -> list[str]:
    outcome = Outcome()
    compare(outcome, "what", [want], [got], noise, **options)
    assert outcome.checked == 2
    return outcome.failures


def test_answers_may_part_at_ties_alone() -> None:
    want = an_answer([5, 6, 7])
    assert failures(want, want) == []
    other = an_answer([5, 99, 8])
    (told,) = failures(want, other)
    assert "prompt 0 parts at token 1, which is 2.900 less likely" in told
    close = an_answer([5, 6, 7], second=-0.3)
    assert failures(close, other) == []
    looser = an_answer([5, 6, 7], second=-0.9)
    assert len(failures(looser, other)) == 1
    assert failures(looser, other, tolerance=SELECTED) == []
    # A token that dense does not even consider.
    assert "inf" in failures(want, an_answer([5, 98, 8]))[0]


def test_log_probabilities_may_differ_by_noise_alone() -> None:
    want = an_answer([5, 6, 7])
    drifted = replace(want, logprobs=[-0.12, -0.08, -0.12])
    (told,) = failures(want, drifted)
    assert "log-probabilities differ by 0.0200 on average, over 0.0100" in told
    assert failures(want, drifted, noise=0.01) == []
    assert failures(want, drifted, tolerance=SELECTED) == []
    # What comes after they part is another text.
    parted = replace(an_answer([5, 99, 7]), logprobs=[-0.1, -9.0, -9.0])
    assert failures(an_answer([5, 6, 7], second=-0.2), parted) == []
    assert EQUAL.tie < SELECTED.tie


def test_every_method_is_served_and_may_attend_to_everything() -> None:
    found = served_checks.configurations()
    model = load_preset("reference", "sparcas").model
    assert model is not None
    longest = served_checks.LENGTHS[-1] + served_checks.TOKENS
    assert {name.split()[0] for name in found} == {"dense", *gpu_check.METHODS}
    drafted, prompted = (
        served_checks.drafting_configurations(),
        served_checks.prompting_configurations(),
    )
    placed = served_checks.placed_configurations()
    assert (len(prompted), len(placed)) == (2, 6)
    found |= drafted | prompted | placed
    for name, flags in found.items():
        if name != "dense":
            config = json.loads(flags[flags.index("--sparse-config") + 1])
            assert config["min_sparse_tokens"] <= served_checks.LENGTHS[0]
            # What a server would refuse is refused here.
            config_of = resolve(name.split()[0], json.dumps(config), model)
            assert getattr(config_of.budget, "cap", longest) >= longest
            assert ("prefill" in config) == name.endswith(served_checks.WITH_SPARSE_PROMPTS)


def test_the_committed_report_is_complete_and_linked() -> None:
    path = scripts.GPU_CHECKS / "h200.json.gz"
    pages = [scripts.ROOT / "README.md", scripts.ROOT / "DESIGN.md", *scripts.DOCS.glob("*.md")]
    linked = [page.name for page in pages if "tests/gpu/h200.json.gz" in page.read_text()]
    assert bool(linked) == path.exists(), linked
    if path.exists():
        report = json.loads(gzip.decompress(path.read_bytes()))
        assert report["ok"] is True
        assert set(report["parts"]) >= {"kernels", "served", "soak"}
        assert report["parts"]["kernels"]["compiled"] is True
        assert set(report["parts"]["served"]["servers"]) == set(served_checks.configurations())
        assert "H200" in report["device"]
        assert report["commit"]


def test_questions_to_ranks_differ_and_fit() -> None:
    asked = rank_questions.questions(5, 600)
    assert len({tuple(ids) for ids, _ in asked}) == len(asked) == 5
    assert all(0 < len(ids) <= 600 - tokens < 600 for ids, tokens in asked)
