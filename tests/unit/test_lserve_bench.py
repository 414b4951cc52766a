# SPDX-License-Identifier: Apache-2.0
"""The benchmark of LServe, from its checks to its report, at tiny shapes and without its clocks."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
import lserve  # isort: skip
import lserve_cases  # isort: skip
import lserve_prompts  # isort: skip
import run  # isort: skip
from cases import Shape  # isort: skip

HEADS = ((1,), (0, 1))


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two KV heads on the CPU; every timed call is run once."""
    changes = {
        "score": {"select": 32}, "budget": {"tokens": 128}, "heads": {"sink": 64, "local": 64},
        "sink_tokens": 16, "recent_tokens": 32, "min_sparse_tokens": 64,
    }  # fmt: skip
    cases = {
        "DEVICE": "cpu", "MODEL": Shape(0, 0, heads=2, group=4, dim=64, budget=128),
        "CHANGES": changes, "CHECKED_DECODE": (265, 2), "CALLS": 2,
        "streaming_heads": lambda: HEADS,
    }  # fmt: skip
    prompts = {
        "DEVICE": "cpu", "CHECKED_TOKENS": 325,
        "CHECKED_PROMPT": {"min_tokens": 160, "fraction": 0.4},
        "PROMPT": {"kind": "block_bounds", "floor": 128, "min_tokens": 160, "min_new_tokens": 1},
    }  # fmt: skip
    bench = {
        "DECODE": ((200, 1), (331, 1)), "PREFILL": (225, 300), "CALLS": 2,
        "rotation": lambda shape: 1, "launches": lambda calls: [call() for call in calls] and [],
        "milliseconds": lambda call, replays: (call(), 5.0)[1],
        "dense_calls": lambda case: [lambda: None], "bench_prefill": kascade,
        "CHUNK": 100, "PREFIXES": (64, 128), "dense_chunk": lambda case: case.served,
        "PrefillCase": lambda tokens: SimpleNamespace(check=dict),
    }  # fmt: skip
    replaced = ((lserve_cases, cases), (lserve_prompts, prompts), (lserve, bench))
    for module, values in replaced:
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(run, "time_calls", once)
    for module in (run, sys.modules["kascade"]):
        monkeypatch.setattr(module, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")


def once(calls: Sequence[Callable[[], Any]], replays: int) -> dict[str, float]:
    for call in calls:
        call()
    return {"us": 10.0, "us_p10": 9.0, "us_p90": 11.0}


def kascade(report: Any, tokens: int, replays: int) -> None:
    """What `kascade.py` leaves of a prompt."""
    shape = Shape(context=tokens, batch=1)
    report.table("kascade prefill", shape, 50.0, 70.0, 20.0, 15.0)


def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> dict[str, Any]:
    out = tmp_path / "lserve.json"
    monkeypatch.setattr(sys, "argv", ["lserve.py", "--out", str(out), "--commit", "abc", *flags])
    lserve.main()
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_quick_report_holds_every_stage_of_one_shape_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reported(tmp_path, monkeypatch, "--quick")
    assert found["commit"] == "abc"
    assert found["failures"] == []
    assert len(found["checks"]) == 4
    assert [row["name"] for row in found["decode_rows"]] == [
        "lserve: score", "lserve: select", "lserve: attend", "lserve, half: selecting step",
        "lserve, preset: selecting step", "lserve, half: reuse step", "lserve, preset: reuse step",
        "flashinfer dense",
    ]  # fmt: skip
    (table,) = found["decode"]
    assert table["half"]["speedup"] == 1.0
    # One of two heads attends to 128 tokens and its own, the other to 64 and 64; both of K and V.
    attend = found["decode_rows"][2]["must_move_bytes"]
    assert attend == (129 + 128) * 2 * 64 * 2
    (prompt,) = found["prefill"]
    assert prompt["block_bounds 0.1"]["times_fa3"] == 10.0
    assert prompt["tile_topk"]["times_fa3"] == 2.5
    stages = [row["stage"] for row in found["prefill_rows"]]
    assert len(stages) == 14
    assert len(set(stages)) == 14
    assert found["chunks"] == [
        {"prefix": 64, "tokens": 100, "us": 5.0, "fa3_us": 5.0, "times_fa3": 1.0}
    ]


def test_a_prompt_in_which_no_tile_selects_is_refused_by_its_length() -> None:
    case = lserve_prompts.PromptCase(Shape(160, 1, heads=2, group=4, dim=64, budget=128))
    with pytest.raises(ValueError, match="a prompt of 160 tokens: tiles select behind 160"):
        case.prompt(fraction=0.1)


def test_without_a_baseline_the_rest_is_reported_and_the_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: Any) -> None:
        raise ImportError("no flashinfer")

    monkeypatch.setattr(lserve, "dense_calls", missing)
    with pytest.raises(SystemExit, match="no flashinfer"):
        reported(tmp_path, monkeypatch, "--quick", "--parts", "decode")
    found = json.loads((tmp_path / "lserve.json").read_text())
    assert found["decode"][0]["half"] == {
        "selecting_us": 10.0, "reuse_us": 10.0, "mean_us": 10.0, "speedup": None,
        "of_copy_bandwidth": found["decode"][0]["half"]["of_copy_bandwidth"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "line"),
    [
        ("tile_mean", "Tensor-likes"),
        ("tile_attention", "attention"),
        ("select_topk", "select_topk"),
        ("page_minmax_score", "scores"),
    ],
)
def test_a_wrong_operator_of_a_prompt_ends_the_run(
    operator: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(lserve_prompts, operator)

    def wrong(*args: Any, impl: str, **kwargs: Any) -> None:
        right(*args, impl=impl, **kwargs)
        if impl != "triton":
            return
        out = kwargs["out"] if "out" in kwargs else args[2].counts
        values = out.values if hasattr(out, "block_max") else out
        values[-1] += 1

    monkeypatch.setattr(lserve_prompts, operator, wrong)
    with pytest.raises(AssertionError, match=line):
        lserve.check_all(["prefill"])


@pytest.mark.parametrize(("stage", "line"), [(0, "scores"), (1, "select_topk"), (2, "attention")])
def test_a_wrong_stage_of_a_decode_step_ends_the_run(
    stage: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = lserve_cases.DecodeCase.run

    def wrong(self: Any, program: Any, stages: slice = slice(None), impl: str = "triton") -> Any:
        out = ran(self, program, stages, impl)
        if impl == "torch" and stages == slice(stage, stage + 1):
            (self.build.scores.values, program.counts, out)[stage][1] += 1
        return out

    monkeypatch.setattr(lserve_cases.DecodeCase, "run", wrong)
    with pytest.raises(AssertionError, match=line):
        lserve.check_all(["decode"])
