# SPDX-License-Identifier: Apache-2.0
"""What a request finds in the lists of the one before it: counts against those made by hand."""

import gzip
import sys
from pathlib import Path

import pytest
import torch

from sglang_sparse.config import configs_dir
from sglang_sparse.research import prefix_lists
from sglang_sparse.research.decode import PAGE, Decoder
from sglang_sparse.research.export import load
from sglang_sparse.research.host_frames import Recording
from sglang_sparse.research.policies import Policy
from sglang_sparse.research.prefix_lists import bounds, frames, stops
from sglang_sparse.research.returning import (
    CONTEXTS,
    SCENES,
    STEPS,
    Request,
    Return,
    Run,
    contexts,
    record,
)
from sglang_sparse.tasks import FileEncoder, TaskSuite

ROOT = Path(__file__).parents[3]
MODEL = configs_dir() / "reference" / "model"
REPORT = configs_dir() / "reference" / "host-report"
POLICY = Policy("sparcas", budget=8, sink=2, recent=2)


def run(steps: list[list[int]], policy: Policy = POLICY, length: int = 32) -> Run:
    """One layer and KV head; each step is the positions that it attends to, recent ones aside."""
    found = []
    for number, positions in enumerate(steps):
        tokens = length + number
        recent = range(tokens - policy.recent, tokens)
        found.append((tokens, {(1, 0): torch.tensor([*positions, *recent])}))
    return Run(policy, Recording(found, policy.recent))


def back(second: Run, *last: int, shared: int = 32, stranger: Run | None = None) -> Return:
    """A request that comes back after one whose last step attended to some positions."""
    first = run([[0, 1], [0, 1, 6], list(last)])
    return Return(SCENES[1], shared, first, second, stranger)


def same(*positions: int) -> list[list[int]]:
    """Step 0 and the ten after it, all alike."""
    return [list(positions)] * (1 + STEPS)


def test_frames_that_hold_another_requests_lists_are_counted_by_hand() -> None:
    second = run([[0, 1, 9, 10, 11], *[[0, 1, 5, 6, 20]] * STEPS])
    found = frames([back(second, 0, 1, 5, 20, 21)], 1)
    assert found["blocks"] == found["budget"] == 5
    assert found["before"] == 1
    # Step 1 attends to 0, 1, 5, 6 and 20. The last step had four of them, the first one three.
    assert found["first"] == found["most_first"]
    assert found["first"] == pytest.approx(
        {"empty": 0, "last": 4 / 5, "opening": 3 / 5, "prompt": 2 / 5, "last + prompt": 4 / 5}
    )
    assert found["in_vain"] == pytest.approx(1 / 5)
    assert found["loads"] == pytest.approx(
        {"empty": 1, "last": 1 / 5, "opening": 2 / 5, "prompt": 3 / 5, "last + prompt": 1 / 5}
    )


def test_lists_are_cut_to_the_tokens_that_are_shared() -> None:
    second = run(same(0, 1, 5, 20))
    found = frames([back(second, 0, 1, 5, 20, shared=8)], 1)
    assert found["first"]["last"] == pytest.approx(3 / 4)
    assert found["in_vain"] == 0


def test_four_budgets_of_frames_replace_what_was_fetched_ahead() -> None:
    # In blocks of 16 tokens the two tokens of a step are a budget of one block: four frames.
    second = run([[0, 16]] * (1 + STEPS), length=160)
    far = frames([back(second, 0, 16, 32, 48, 64, 80, shared=160)], 16)
    assert far["budget"] == 1
    assert far["most_first"]["last"] == 1
    assert far["first"]["last"] == 1  # what a list has beyond the frames is not kept
    wide = run([[0], *[[16 * i for i in range(6)]] * STEPS], length=160)
    short = frames([back(wide, 0, shared=160)], 16)
    assert short["least_loads"]["empty"] < short["loads"]["empty"]


def test_stops_are_compared_by_hand() -> None:
    policy = Policy("sparcas", budget=20, sink=2, recent=2, epsilon=0.9, microbatch=2)
    # Sinks and recent tokens aside: two tokens are a microbatch.
    second = run([[0, 1, 5, 6], *[[0, 1, 5, 6, 7, 8, 9]] * STEPS], policy)
    first = run([[0, 1], [0, 1, 4], [0, 1, 4, 5, 6, 7, 8, 9, 10]], policy)
    stranger = run([[0, 1], [0, 1, 4, 5, 6, 7, 8]], policy)
    assert second.depths(0) == {(1, 0): 1}
    assert second.depths(1) == {(1, 0): 3}
    found = stops([Return(SCENES[0], 32, first, second, stranger)])
    assert found["depth"] == 3
    assert found["last"] == pytest.approx({"covered": 1, "layers": 1, "short": 0, "in_vain": 1 / 3})
    less = {"covered": 0, "layers": 0, "short": 2 / 3, "in_vain": 0}
    assert found["prompt"] == found["opening"] == pytest.approx(less)
    exact = {"covered": 1, "layers": 1, "short": 0, "in_vain": 0}
    assert found["slot"] == found["step before"] == pytest.approx(exact)
    assert found["constant"]["in_vain"] == pytest.approx(5 / 3)


def test_a_threshold_from_an_old_list_is_counted_by_hand() -> None:
    second = run(same(0, 1, 10, 11, 12, 13))
    # Four of 28 free units win. Scores fall with the distance from unit 10.
    scores = -(torch.arange(48.0) - 10).abs()[None]
    second.scores.extend([{1: scores}] * (1 + STEPS))
    found = bounds([back(second, 0, 1, 10, 15)])
    # Unit 15 is the lowest of the list: units 5 to 15 reach its score.
    assert found["last"]["candidates"] == pytest.approx(11 / 4)
    assert found["last"]["short"] == 0
    # Unit 13 is at a distance of 3: units 7 to 13.
    assert found["step before"]["candidates"] == found["prompt"]["candidates"] == 7 / 4
    # Four blocks of eight are too few for four maxima: the fourth best score, tied with the fifth.
    assert found["today"]["candidates"] == pytest.approx(5 / 4)
    # A list that lacks the best units has a threshold that too few reach.
    poor = bounds([back(second, 0, 1, 10, 20, shared=12)])
    assert poor["last"]["candidates"] == pytest.approx(1 / 4)
    assert poor["last"]["short"] == 1


def test_documents_have_two_questions_and_share_whole_pages() -> None:
    suite = TaskSuite(FileEncoder(MODEL), "heldout")
    found = list(contexts(suite, CONTEXTS, 1024, 1, 0))
    assert len(found) == len(CONTEXTS)
    for context in found:
        assert context.first.answer != context.other.answer
        same_question, other, turn = context.scenes.values()
        before = context.first.prompt + context.first.answer
        shared = [context.shared(r) for r in (other, same_question, turn)]
        assert 700 < shared[0] <= shared[1] <= shared[2]
        for request, tokens in zip((other, same_question, turn), shared, strict=True):
            assert request.prompt[:tokens] == before[:tokens]
            assert tokens % PAGE == 0
            assert tokens < len(request.prompt)
        assert turn.prompt[: len(before)] == before
        alike = context.first.answer[0] == context.other.answer[0]
        assert list(context.scenes) == [SCENES[0], SCENES[1 if alike else 2], SCENES[3]]
    assert list(found[0].scenes)[1] == SCENES[1]
    assert {list(context.scenes)[1] for context in found} == {SCENES[1], SCENES[2]}


def test_a_run_keeps_the_scores_that_its_lists_follow_from() -> None:
    suite = TaskSuite(FileEncoder(MODEL), "heldout")
    whole = next(contexts(suite, ["multi_key"], 512, 1, 0)).first
    request = Request(whole.prompt, whole.answer[:4])
    policy = Policy("page_minmax", budget=128, dense_layers=1)
    decoder = Decoder(load(MODEL).eval(), [request.prompt[:-1]], len(request.answer) + 1)
    found = record(decoder, request, policy)
    assert len(found.recording.steps) == len(request.answer)
    assert found.recording.steps[0][0] == len(request.prompt)
    assert len(found.scores) == 4
    for step, layers in enumerate(found.scores):
        assert sorted(layers) == [1, 2, 3, 4, 5]
        always = set(found.always(step).tolist())
        for layer, rows in layers.items():
            for head, row in enumerate(rows):
                units = set(found.units(step, (layer, head)).tolist())
                assert always <= units
                free = [u for u in row.argsort(descending=True).tolist() if u not in always]
                assert units - always == set(free[: len(units) - len(always)])


def test_the_committed_tables_are_those_of_the_committed_rows(tmp_path: Path) -> None:
    plain = tmp_path / "prefix-lists.json"
    plain.write_bytes(gzip.decompress((REPORT / "prefix-lists.json.gz").read_bytes()))
    found = prefix_lists.read(plain)
    page = (ROOT / "docs" / "host-memory.md").read_text()
    for table in prefix_lists.tables(found):
        assert table in page
    assert {row["preset"] for row in found["frames"]} == set(prefix_lists.PRESETS)


def test_the_command_measures_and_prints_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found" / "lists.json"
    arguments = ["--model", str(MODEL), "--out", str(out), "--length", "512", "--count", "1"]
    arguments += ["--tasks", "multi_key"]
    presets, scenes = ["page_minmax", "psa"], {SCENES[0], SCENES[1], SCENES[3]}
    monkeypatch.setattr(sys, "argv", ["prefix_lists", *arguments, "--presets", *presets])
    prefix_lists.main()
    found = prefix_lists.read(out)
    assert {(row["preset"], row["scene"]) for row in found["frames"]} == {
        (preset, scene) for preset in presets for scene in scenes
    }
    for row in found["frames"]:
        assert row["first.empty"] == 0 < row["first.prompt"]
        # The same prompt decodes the same.
        assert row["scene"] != SCENES[0] or row["most_first.opening"] > 0.9
        for start in prefix_lists.STARTS:
            assert row[f"loads.{start}"] >= row[f"least_loads.{start}"]
    assert [row["preset"] for row in found["bounds"]] == ["page_minmax"]
    assert {row["preset"] for row in found["stops"]} == {"psa"}
    printed = capsys.readouterr().out
    for table in prefix_lists.tables(found):
        assert table in printed
