# SPDX-License-Identifier: Apache-2.0
"""Training on several ranks: one model, rows of each rank's own, one clock."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_sparse.research.corpus import tokens
from sglang_sparse.research.export import load
from sglang_sparse.tasks import FileEncoder
from sglang_sparse.tasks.corpus import documents
from sglang_sparse.tasks.encoding import BOS

MODEL = Path(__file__).parents[3] / "configs" / "reference" / "model"
# What each rank computed on, and its parameters at the end, beside the export of the first.
PROGRAM = """
import itertools, sys, torch
from sglang_sparse.research.train import Trainer, parser
from sglang_sparse.tasks import corpus
files = list(itertools.islice(corpus._files(), 40))  # all of them take seconds to encode
corpus._files = lambda: iter(files)
trainer = Trainer(parser().parse_args(sys.argv[2:]))
stepper = trainer.stepper("text", 2, 256)
seen, load = [], stepper.load
stepper.load = lambda ids, *rest: (seen.append(ids.clone()), load(ids, *rest))
trainer.run()
torch.save(
    {"weights": trainer.model.state_dict(), "rows": torch.stack(seen), "clock": trainer.elapsed},
    f"{sys.argv[1]}/rank{trainer.ranks.rank}.pt",
)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    encoder = FileEncoder(MODEL)
    parts = [[encoder.token_id(BOS), *encoder.encode("".join(d))] for d in documents("train")[:20]]
    text = np.array([i for part in parts for i in part], dtype=np.uint16)
    path = tmp_path_factory.mktemp("corpus") / "tokens.xz"
    tokens.save(tokens.Corpus(text, text[:2000]), path)
    return path


def train(out: Path, corpus: Path, ranks: int) -> list[dict[str, torch.Tensor]]:
    """Two steps of 2 x 256 tokens on each of ``ranks``."""
    out.mkdir()
    program = out / "program.py"
    program.write_text(PROGRAM)
    flags = f"""--out {out} --tokenizer {MODEL} --corpus {corpus} --text-tokens 512 --log-every 1
        --hidden-size 32 --intermediate-size 48 --layers 2 --heads 2 --kv-heads 1 --head-dim 16
        --first-stage 7 --max-steps 2 --symbol-share 0 --seed 3 --lr 0.1"""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    subprocess.run(
        [*launch, str(ranks), str(program), str(out), *flags.split()], check=True, timeout=240
    )
    return [torch.load(out / f"rank{rank}.pt") for rank in range(ranks)]


def test_ranks_train_one_model_on_rows_of_their_own(tmp_path: Path, corpus: Path) -> None:
    (one,) = train(tmp_path / "one", corpus, 1)
    first, second = train(tmp_path / "two", corpus, 2)
    assert not torch.equal(first["rows"], second["rows"])
    assert first["clock"] == second["clock"]
    for name, weights in first["weights"].items():
        assert torch.equal(weights, second["weights"][name]), name
    assert any(not torch.equal(w, one["weights"][n]) for n, w in first["weights"].items())
    exported = load(tmp_path / "two" / "export").state_dict()
    assert all(torch.equal(w.bfloat16().float(), exported[n]) for n, w in first["weights"].items())
    logs = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    assert [sum("text" in line for line in log) for log in logs] == [2, 2]
    assert json.loads((tmp_path / "two" / "state.json").read_text())["tokens"] == 2 * 2 * 512


def test_gradients_are_the_mean_over_ranks(tmp_path: Path) -> None:
    program = tmp_path / "mean.py"
    program.write_text(
        """
import torch
from sglang_sparse.research.ranks import Ranks
ranks = Ranks()
gradients, counts = torch.arange(3.0) * (1 + 4 * ranks.rank), torch.tensor([1.0 + ranks.rank])
ranks.mean(gradients)
ranks.add(counts)
assert gradients.tolist() == [0.0, 3.0, 6.0], gradients
assert counts.tolist() == [3.0], counts
ranks.close()
"""
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    subprocess.run([*launch, "2", str(program)], check=True, timeout=240)
