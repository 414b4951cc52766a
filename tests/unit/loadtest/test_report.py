# SPDX-License-Identifier: Apache-2.0
"""The page of a capacity search, and how it compares servers."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from load_trials import LIMITS, searched

import scripts  # noqa: F401  isort: skip  # makes the load tests importable
import capacity  # isort: skip
import objectives  # isort: skip
import report  # isort: skip


def capacity_report(label: str, speed: float, **changes: Any) -> dict[str, Any]:
    trials = searched(speed)
    return {
        "label": label, "scenario": "s", "about": "<what>", "sglang": "0", "trials": trials,
        "unloaded": {"step_s": 0.01, "first_token_s": 0.1}, "limits_s": LIMITS,
        "limits_from": "dense.json", "settings": {"seconds": 60, "least_rate": 1, "most_rate": 64},
        "capacity": {
            name: {"met": objectives.highest_met(trials, name),
                   "missed": objectives.lowest_missed(trials, name)}
            for name in LIMITS
        },
    } | changes  # fmt: skip


def test_the_page_holds_a_table_plots_and_every_trial(tmp_path: Path) -> None:
    speeds = {"dense": 10.0, "sparcas": 20.0}
    for label, speed in speeds.items():
        (tmp_path / f"{label}.json").write_text(json.dumps(capacity_report(label, speed)))
    plain = tmp_path / "dense.json"
    (tmp_path / "dense.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    (tmp_path / "other.json").write_text("{}")
    page = report.write_report(tmp_path).read_text()
    assert page.count("<svg") == 1
    assert page.index("<h2>dense") < page.index("<h2>sparcas")
    assert "&lt;what&gt;" in page
    # In words, in cells of their own.
    for word in ("met", "missed", "undecided"):
        assert f"<td class='name {word}'>{word}</td>" in page
    assert "strict 50.0 ms and relaxed 250.0 ms" in page
    table = (tmp_path / "capacity.md").read_text()
    assert table.splitlines()[0].count("|") == table.splitlines()[2].count("|")
    dense, sparcas = table.splitlines()[2:]
    met = "33.3 ms [33.0, 33.7], 9,000 gaps, 1.6 answered/s, queue 100 ms<br>"
    assert f"| 7 met, 10 missed, 8 undecided | 7: {met}10: " in dense
    assert f"| 14 met, 20 missed, 16 undecided | 14: {met}" in sparcas
    missed = "10000.0 ms [9900.0, 10100.0], 9,000 gaps, 1.6 answered/s, queue 5,000 ms<br>"
    assert f"10: {missed}8: " in dense
    # 14 of at most 10, 20 of at least 7.
    assert "| 1.40 to 2.86 x |" in sparcas
    with pytest.raises(ValueError, match="no report"):
        report.write_report(tmp_path / "nothing")


def test_reports_of_several_folders_make_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    paths = []
    for label, speed in {"page_minmax": 20.0, "dense": 10.0}.items():
        (tmp_path / label).mkdir()
        paths.append(tmp_path / label / f"{label}.json")
        paths[-1].write_text(json.dumps(capacity_report(label, speed)))
    line = ["capacity", "--out", str(tmp_path / "page"), "--combine", *map(str, paths)]
    monkeypatch.setattr(sys, "argv", line)
    capacity.main()
    table = (tmp_path / "page" / "capacity.md").read_text().splitlines()
    assert [row.split("|")[1].strip() for row in table[2:]] == ["dense", "page_minmax"]
    assert (tmp_path / "page" / "capacity.html").exists()
    other = capacity_report("page_minmax", 20.0, limits_s={"strict": 0.04, "relaxed": 0.2})
    paths[0].write_text(json.dumps(other))
    with pytest.raises(SystemExit) as ended:
        capacity.main()
    assert ended.value.code == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "page_minmax and dense cannot be compared: limits_s" in told


@pytest.mark.parametrize("name", ["seconds", "least_rate", "most_rate"])
def test_servers_with_other_rates_or_trials_are_not_compared(tmp_path: Path, name: str) -> None:
    settings = {"seconds": 60, "least_rate": 1, "most_rate": 64}
    for label, changes in (("dense", {}), ("sparcas", {name: 99})):
        found = capacity_report(label, 10.0, settings=settings | changes)
        (tmp_path / f"{label}.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=f"dense and sparcas cannot be compared: {name} is .* 99;"):
        report.write_report(tmp_path)


def test_an_answer_without_a_rate_that_was_met_has_its_samples_too() -> None:
    missed = capacity_report("dense", 10.0)
    missed["capacity"]["strict"] = {"met": None, "missed": 10.0}
    missed["trials"] = [trial for trial in missed["trials"] if trial["rate"] >= 8]
    assert report.answer(missed, "strict") == "10 missed, 8 undecided"
    assert report.samples(missed, "strict").count("gaps") == 2


def test_a_rate_says_what_else_than_gaps_it_missed_by() -> None:
    found = capacity_report("dense", 10.0)
    found["capacity"]["strict"] = {"met": None, "missed": 10.0}
    silent = {"gap_p99_s": None, "gap_p99_interval_s": None, "gaps": 0, "done": 7}
    found["trials"] = [t | silent for t in found["trials"] if t["rate"] == 10]
    assert report.samples(found, "strict") == (
        "10: no gaps, 0.112 answered/s, queue 5,000 ms, 7 of 100 answered"
    )


def test_undecided_rates_below_the_highest_that_was_met_are_told() -> None:
    found = capacity_report("sparcas", 20.0)
    (trial,) = (t for t in found["trials"] if t["rate"] == 8)
    trial["verdicts"]["strict"] = objectives.UNDECIDED
    assert report.answer(found, "strict") == "14 met, 20 missed, 8, 16 undecided"
    assert report.samples(found, "strict").count("gaps") == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"met": 14.0, "missed": None}, "above 1.40 x"),
        ({"met": None, "missed": 20.0}, "below 2.86 x"),
        ({"met": None, "missed": None}, "-"),
    ],
)
def test_a_ratio_says_no_more_than_is_known(change: dict[str, Any], words: str) -> None:
    base = capacity_report("dense", 10.0)
    one = capacity_report("sparcas", 20.0, capacity={"strict": change})
    assert report.ratio(one, base, "strict") == words
