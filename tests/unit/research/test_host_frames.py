# SPDX-License-Identifier: Apache-2.0
"""Hit rates of frames: the pool against a plain one, counts against those made by hand."""

import gzip
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from sglang_sparse.config import configs_dir
from sglang_sparse.research import host_frames
from sglang_sparse.research.frames import FramePool
from sglang_sparse.research.host_frames import Recording, hit_rates
from sglang_sparse.research.tables import from_columns

ROOT = Path(__file__).parents[3]
REPORT = configs_dir() / "reference" / "host-report"


class PlainPool:
    """The same from the definition: each frame with its block and when that was last used."""

    def __init__(self, frames: int) -> None:
        self.frames: list[tuple[int, object] | None] = [None] * frames
        self.clock = 0

    def touch(self, blocks: list[object]) -> int:
        hits = 0
        missing = []
        for block in blocks:
            self.clock += 1
            held = [i for i, f in enumerate(self.frames) if f is not None and f[1] == block]
            assert len(held) <= 1, "two frames hold a block"
            if held:
                self.frames[held[0]] = (self.clock, block)
                hits += 1
            else:
                missing.append(block)
        for block in missing:
            self.clock += 1
            victims = [i for i, f in enumerate(self.frames) if f is None or f[1] not in blocks]
            if victims:
                oldest = min(victims, key=lambda i: (self.frames[i] or (-1, None))[0])
                self.frames[oldest] = (self.clock, block)
        return hits


@pytest.mark.parametrize("frames", [1, 2, 5, 16, 40])
def test_frames_are_replaced_by_recency(frames: int) -> None:
    draw = random.Random(frames)
    pool, plain = FramePool(frames), PlainPool(frames)
    hits = []
    for _ in range(400):
        # Neighbours of the last ones more often than others, and now and then more than fit.
        most = draw.choice((3, 8, 30))
        blocks = draw.sample(range(draw.choice((6, 20, 60))), min(most, 6))
        hits.append(pool.touch(blocks))
        assert hits[-1] == plain.touch(list(blocks))
    assert 0 < sum(hits) < 6 * 400


def recording(*steps: list[int], recent: int = 4, length: int = 36) -> Recording:
    """One layer and KV head; each step is the positions that it attends to."""
    return Recording(
        [(length + i, {(1, 0): torch.tensor(found)}) for i, found in enumerate(steps)], recent
    )


def test_blocks_with_recent_tokens_do_not_count() -> None:
    one = recording([0, 1, 9, 30, 35])
    # Blocks of 8 tokens: position 32 is recent, so blocks from 4 on are always there.
    assert list(one.touched(8)) == [[[(1, 0, 0), (1, 0, 1), (1, 0, 3)]]]
    assert one.tokens(8) == 4
    assert list(one.touched(1)) == [[[(1, 0, 0), (1, 0, 1), (1, 0, 9), (1, 0, 30)]]]


def test_hit_rates_are_those_counted_by_hand() -> None:
    one = recording([0, 8], [0, 16], [8, 16], [8, 24])
    found = hit_rates([one], 8)
    # Two tokens a step are a quarter of a block: one frame is one budget.
    assert found["budget"] == 1
    assert found["blocks"] == 2
    # Of the six blocks behind the first step: 0, 16 and 8 were in the step before, 8 earlier.
    assert found["repeated"] == pytest.approx(3 / 6)
    assert found["earlier"] == pytest.approx(4 / 6)
    # One frame holds the first block that misses: 0, then 0 again, then 8, then 8 again.
    assert found["frames"]["1"] == pytest.approx(2 / 6)
    # Two hold the step before; four hold everything.
    assert found["frames"]["2"] == pytest.approx(3 / 6)
    assert found["frames"]["4"] == pytest.approx(4 / 6)


def test_layers_are_looked_up_one_after_the_other() -> None:
    steps = [(40, {(1, 0): torch.tensor([0, 8]), (2, 0): torch.tensor([0, 8])}) for _ in range(3)]
    # One frame goes from layer to layer: no block is there in time.
    assert hit_rates([Recording(steps, 4)], 8)["frames"]["1"] == 0
    assert hit_rates([Recording(steps, 4)], 8)["frames"]["4"] == 1


def test_the_committed_table_is_that_of_the_committed_rows() -> None:
    found = from_columns(json.loads(gzip.decompress((REPORT / "frames.json.gz").read_bytes())))
    assert host_frames.table(found) in (ROOT / "docs" / "host-memory.md").read_text()
    assert {row["preset"] for row in found["rows"]} == set(host_frames.PRESETS)


def test_the_command_measures_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found" / "frames.json"
    arguments = ["--model", str(configs_dir() / "reference" / "model"), "--out", str(out)]
    arguments += ["--length", "512", "--texts", "1", "--steps", "3", "--answers", "1"]
    monkeypatch.setattr(
        sys, "argv", ["host_frames", *arguments, "--presets", "page_minmax", "kascade"]
    )
    host_frames.main()
    found = json.loads(out.read_text())
    assert found["traces"]["text"] == {"requests": 1, "steps": 3}
    blocks = {(row["trace"], row["preset"], row["block"]) for row in found["rows"]}
    assert ("text", "kascade", 1) in blocks
    assert ("answers", "page_minmax", 16) in blocks
    for row in found["rows"]:
        rates = list(row["frames"].values())
        assert rates == sorted(rates)  # more frames hold at least as much
        assert rates[0] >= 0
        assert rates[-1] <= row["earlier"] <= 1
        assert row["repeated"] <= row["earlier"]
    assert host_frames.table(found) in capsys.readouterr().out
