# SPDX-License-Identifier: Apache-2.0
"""Parts of the evaluation that need no server."""

import io
import json
import math
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from sglang_sparse import compat
from sglang_sparse.compat import v0517
from sglang_sparse.config import ConfigError
from sglang_sparse.evaluate import harness
from sglang_sparse.evaluate.arms import Arm, make_arms
from sglang_sparse.evaluate.forcing import SCALE, ForcedTokens, serialized
from sglang_sparse.evaluate.journal import Journal
from sglang_sparse.evaluate.report import cells, draw, publish
from sglang_sparse.tasks import wilson

TOKENS = {
    "axes": {"budget": {"kind": "tokens", "tokens": 512}},
    "request_budget": {"unit": "tokens", "least": 81, "most": 4096},
}
SHARE = {
    "axes": {"budget": {"kind": "fraction", "fraction": 0.1, "floor": 128}},
    "request_budget": {"unit": "fraction", "least": 1e-6, "most": 0.5},
}


def test_arms_are_dense_and_the_budgets_in_rising_order() -> None:
    arms = make_arms(["1024", "128", "1024"], TOKENS)
    assert [arm.name for arm in arms] == ["dense", "128", "1024"]
    assert [arm.custom_params for arm in arms] == [
        {"sparse": {"mode": "dense"}},
        {"sparse": {"budget": 128}},
        {"sparse": {"budget": 1024}},
    ]
    assert [arm.name for arm in make_arms([], TOKENS)] == ["dense", "512"]
    assert make_arms(["0.25"], SHARE)[1].options == {"budget": 0.25}
    for bad in ("80", "4097", "0.1", "x"):
        with pytest.raises(ConfigError, match="81 to 4096"):
            make_arms([bad], TOKENS)


def test_shares_of_the_mass_are_compared_by_epsilon() -> None:
    state = {
        "axes": {"budget": {"kind": "mass", "epsilon": 0.95}},
        "request_budget": {"unit": "epsilon", "least": 1e-6, "most": 0.95},
    }
    assert [arm.options for arm in make_arms(["0.9"], state)] == [
        {"mode": "dense"},
        {"budget": 0.9},
    ]
    assert [arm.name for arm in make_arms([], state)] == ["dense", "0.95"]
    with pytest.raises(ConfigError, match="max_epsilon"):
        make_arms(["0.96"], state)


def test_half_a_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    for index in range(3):
        Journal(tmp_path, {"a": 1}).add(("t", 9, index, "dense"), exact=True)
        path = tmp_path / "journal.jsonl"
        path.write_text(path.read_text() + '{"task": "t", "len')
    assert [entry["index"] for entry in Journal(tmp_path, {"a": 1}).entries()] == [0, 1, 2]
    with pytest.raises(ConfigError, match="other settings"):
        Journal(tmp_path, {"a": 2})
    with pytest.raises(ConfigError, match=r"--out .*journal\.jsonl: it cannot be made"):
        Journal(tmp_path / "journal.jsonl", {"a": 1})


def test_a_forced_token_wins_and_reports_its_true_log_probability() -> None:
    torch.manual_seed(3)
    logits = torch.randn(3, 50) * 4
    logits[2, 7] = -140.0  # so unlikely that the report is cut off
    truth = logits.log_softmax(-1)
    params: list[dict[str, Any]] = [
        {"forced": [5, 9]},
        {"forced": [0, 1], "step": 1},
        {"forced": [7]},
    ]
    reported = ForcedTokens()(logits.clone(), params).log_softmax(-1)
    for row, token in enumerate((5, 1, 7)):
        assert int(reported[row].argmax()) == token
    # Two exponentials, their sum and two logarithms of numbers below one, either way.
    rounding = SCALE * 2 * 5 * 2.0**-24
    assert SCALE * float(reported[0, 5]) == pytest.approx(float(truth[0, 5]), abs=rounding)
    assert SCALE * float(reported[1, 1]) == pytest.approx(float(truth[1, 1]), abs=rounding)
    assert SCALE * float(reported[2, 7]) == pytest.approx(SCALE * math.log(2 / 3), abs=rounding)
    assert [p["step"] for p in params] == [1, 2, 1]


def test_what_is_sampled_inside_of_a_prompt_takes_no_token() -> None:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = Req("r", "", array("q", [1] * 9), SamplingParams(max_new_tokens=2), vocab_size=8)
    params: dict[str, Any] = {"forced": [3, 4], "__req__": request}
    for end, token in ((5, 3), (9, 3), (9, 4)):
        if compat.current() is v0517:
            request.set_extend_range(0, end)
        else:
            request.extend_end = end
        assert int(ForcedTokens()(torch.zeros(1, 8), [params]).argmax()) == token


def test_the_server_can_load_the_processor_by_its_name() -> None:
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    assert isinstance(CustomLogitProcessor.from_str(serialized()), ForcedTokens)


def test_perplexities_come_from_mean_losses_and_carry_their_spread() -> None:
    entries = [
        {"task": "perplexity", "length": 9, "index": i, "arm": "dense", "nll": nll}
        for i, nll in enumerate((1.0, 1.2, 1.4))
    ]
    cell = cells(entries, [Arm("dense", {})])[0]
    assert cell["value"] == pytest.approx(math.exp(1.2))
    half = 1.959964 * 0.2 / math.sqrt(3)
    assert cell["low"] == pytest.approx(math.exp(1.2 - half))
    assert cell["high"] == pytest.approx(math.exp(1.2 + half))
    assert cells(entries[:1], [Arm("dense", {})])[0]["low"] is None


def test_cells_of_lm_eval_have_its_metrics_and_intervals() -> None:
    found = {
        "results": {
            "exact": {"alias": "exact", "sample_len": 4, "exact_match,none": 0.75,
                      "exact_match_stderr,none": 0.25},
            "overlap": {"alias": "overlap", "sample_len": 3, "f1,none": 0.5, "f1_stderr,none": 0.1,
                        "bleu,none": 20.0, "bleu_stderr,none": "N/A"},
            "group": {"alias": "group", "exact_match,none": 0.6, "exact_match_stderr,none": 0.05},
        },
        "samples": {
            "exact": [{"filter": "none", "exact_match": v} for v in (1, 1, 0.0, 1)],
            "overlap": [{"filter": "none", "f1": v, "bleu": ("a", "b")} for v in (0.2, 0.5, 0.8)],
        },
    }  # fmt: skip
    made = {c["task"]: c for c in harness._cells(found, Arm("128", {"budget": 128}))}
    assert set(made) == {"exact exact_match,none", "overlap f1,none", "overlap bleu,none",
                          "group exact_match,none"}  # fmt: skip
    exact, f1 = made["exact exact_match,none"], made["overlap f1,none"]
    assert (exact["count"], exact["value"]) == (4, 0.75)
    assert (exact["low"], exact["high"]) == wilson(3, 4)
    assert (f1["low"], f1["high"]) == pytest.approx((0.5 - 1.96 * 0.1, 0.5 + 1.96 * 0.1), abs=1e-3)
    assert made["overlap bleu,none"]["low"] is None
    assert made["group exact_match,none"]["high"] == pytest.approx(0.698, abs=1e-3)
    assert all(c["arm"] == "128" and c["length"] is None for c in made.values())


SHOWN = {"budget_unit": "tokens", "model": "m", "method": "sparcas"}
ARMS = [Arm("dense", {}), Arm("128", {"budget": 128}), Arm("256", {"budget": 256})]


def perfect(tasks: tuple[str, ...], count: int) -> list[dict[str, Any]]:
    """Cells of tasks that every arm answers without a mistake."""
    entries = [
        {"task": task, "length": 4096, "index": i, "arm": arm.name, "exact": True, "recall": 1.0}
        for task in tasks
        for arm in ARMS
        for i in range(count)
    ]
    return cells(entries, ARMS)


def published(folder: Path, found: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    publish(folder, SHOWN, found, ARMS, Console(file=text, width=200))
    return text.getvalue()


@pytest.mark.parametrize("count", [1, 2, 50])
def test_a_perfect_score_is_printed_written_and_drawn(tmp_path: Path, count: int) -> None:
    found = perfect(("passkey",), count)
    told = published(tmp_path, found)
    assert told.count("1.000]") == len(ARMS)
    assert "warning" not in told
    assert json.loads((tmp_path / "results.json").read_text())["cells"] == found
    assert (tmp_path / "accuracy.png").read_bytes()[:4] == b"\x89PNG"
    # Nothing left to ask: the report is made again.
    assert published(tmp_path, found) == told


def test_a_report_that_cannot_be_drawn_is_still_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = perfect(("passkey",), 4)
    published(tmp_path, found[:1])

    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("no ink\nat all")

    monkeypatch.setattr(Figure, "savefig", refuse)
    told = published(tmp_path, found).splitlines()
    assert any("passkey" in line for line in told)
    (warning,) = [line for line in told if line.startswith("warning: ")]
    assert "accuracy.png was not drawn (ValueError: no ink at all)" in warning
    assert warning == told[-1]
    assert len(json.loads((tmp_path / "results.json").read_text())["cells"]) == len(ARMS)
    assert (tmp_path / "results.csv").read_text().count("passkey") == len(ARMS)
    assert not (tmp_path / "accuracy.png").exists(), "the picture of an earlier run was left"


def test_equal_curves_stay_visible() -> None:
    tasks = ("multi_key", "passkey", "single")
    (axes,) = draw(perfect(tasks, 50), ARMS, SHOWN).axes
    curves = [line for line in axes.get_lines() if line.get_linestyle() != "None"]
    places = [tuple(line.get_xdata()) for line in curves]
    assert len(curves) == len(tasks)
    assert len({x for place in places for x in place}) == 2 * len(tasks), "curves lie on another"
    assert len({line.get_linestyle() for line in curves}) == len(tasks)
    markers = [bars.lines[0] for bars in axes.containers]
    assert len({line.get_marker() for line in markers}) == len(tasks)
    # Every arm, dense too, is a point of each.
    assert [len(line.get_xdata()) for line in markers] == [len(ARMS)] * len(tasks)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["128", "256", "dense"]
