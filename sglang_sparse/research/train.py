# SPDX-License-Identifier: Apache-2.0
"""Trains the reference model, resumably: ``python -m sglang_sparse.research.train --help``.

Symbols first, at 64 tokens, then longer; then text, and chats over text with needles, from 256 to
32K tokens. A stage ends when its accuracy is there or its time is over. A run that ended goes on by
the same command with ``--resume``: from ``checkpoint.pt``, or, where that is lost, from the 12 MiB
of ``export/`` and ``state.json``. Seeds, stages, losses and accuracies go to ``log.jsonl``.

On several GPUs, ``torchrun --nproc-per-node N -m sglang_sparse.research.train`` takes N steps' rows
in one.
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sglang_sparse.research import mix
from sglang_sparse.research.average import average
from sglang_sparse.research.curriculum import (
    FINAL_LENGTHS,
    FINAL_WEIGHTS,
    Stage,
    TextFeed,
    curriculum,
)
from sglang_sparse.research.export import export, load
from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.research.optimizer import Optimizer
from sglang_sparse.research.ranks import Ranks
from sglang_sparse.research.step import Stepper, compile_pieces, flat_gradients
from sglang_sparse.research.symbols import SymbolTask, symbol_batch
from sglang_sparse.tasks.encoding import FileEncoder
from sglang_sparse.tasks.registry import TASKS
from sglang_sparse.tasks.scoring import WORD_TASKS

# Their mean decides when a stage ends; counting is left to time.
MEASURED = tuple(mix.TRAIN_TASKS.index(t) for t in TASKS if t not in (*WORD_TASKS, "tally"))
_WARM_UP = 200
_LAST_RATE = 0.03


@dataclass
class State:
    """Progress that a checkpoint carries beside the weights."""

    seed: int
    stage: int = 0
    stage_steps: int = 0
    step: int = 0
    tokens: int = 0
    text_jobs: int = 0
    seconds: float = 0.0
    warm_from: int = 0
    macro: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Runs the curriculum until the time is up."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.encoder = FileEncoder(args.tokenizer)
        source = mix.RowSource(args.tokenizer, args.corpus, args.text_rows)
        self.feed = TextFeed(source, args.workers)  # forks, so before any thread of the ranks
        self.ranks = Ranks()
        self.device = self.ranks.device
        geometry = {
            k: v for k, v in vars(args).items() if k in ModelConfig.__dataclass_fields__ and v
        }
        config = ModelConfig(vocab_size=self.encoder.vocab_size, **geometry)
        model = load(args.warm_start) if args.warm_start else ReferenceModel(config, args.seed)
        self.model = model.to(self.device)
        self.gradients = flat_gradients(self.model)
        self.state = State(args.seed, stage=args.first_stage)
        self.optimizer = Optimizer(self.model)
        self.stages = curriculum(self.encoder.vocab_size, args.text_tokens)
        self.steppers: dict[tuple[str, int, int], Stepper] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.compiled = False
        self.started = self.last_save = self.now = self.ranks.now()
        self.base_seconds = 0.0
        self.log_file = (self.out / "log.jsonl").open("a")
        if args.resume:
            self.restore()
        self.generator = torch.Generator(device=self.device)
        rows = args.seed * 1_000_003 + self.state.step
        self.generator.manual_seed(rows + self.ranks.rank * 2_000_000_011)
        self.random = random.Random(args.seed * 7919 + self.state.step)
        self.base_seconds = self.state.seconds

    def restore(self) -> None:
        """Continue from what lies in the output folder; begin where there is nothing.

        An export has weights in bf16 and no moments, so the rate warms up anew.
        """
        checkpoint, state = self.out / "checkpoint.pt", self.out / "state.json"
        if checkpoint.exists():
            saved = torch.load(checkpoint, map_location=self.device, weights_only=False)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.state = State(**saved["state"])
        elif state.exists():
            self.model.load_state_dict(load(self.out / "export").state_dict())
            self.state = State(**json.loads(state.read_text()))
            self.state.warm_from = self.state.step
        else:
            return
        self.log(event="resumed", exact=checkpoint.exists())

    def save(self) -> None:
        """Write a checkpoint and an export; neither replaces the last one before it is whole."""
        self.last_save = self.now
        if not self.ranks.first:
            return
        self.state.seconds = self.elapsed
        path = self.out / "checkpoint.pt"
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": asdict(self.state),
        }
        torch.save(saved, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
        folder, draft = self.out / "export", self.out / "export.tmp"
        export(self.model, draft, self.args.tokenizer)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
        if self.args.keep_exports or self.args.mean:
            kept = self.out / "exports" / f"{self.state.step:06d}"
            shutil.copytree(folder, kept, dirs_exist_ok=True)
        (self.out / "state.json").write_text(json.dumps(asdict(self.state)))

    def log(self, **entry: Any) -> None:
        """One JSON line to the log and to standard output, from the first rank."""
        if not self.ranks.first:
            return
        entry = {"step": self.state.step, "seconds": round(self.elapsed, 1), **entry}
        line = json.dumps(entry)
        print(line, flush=True)
        self.log_file.write(line + "\n")
        self.log_file.flush()

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, of earlier processes too."""
        return self.base_seconds + self.now - self.started

    def rate(self) -> float:
        """Learning rate: warm-up, then flat, then linear decay over the last share of the time."""
        rate = self.args.lr * min(1.0, (self.state.step - self.state.warm_from + 1) / _WARM_UP)
        left = (1 - self.elapsed / self.args.time_limit) / self.args.decay_share
        return float(rate * (_LAST_RATE + (1 - _LAST_RATE) * min(max(left, 0.0), 1.0)))

    def stepper(self, kind: str, batch: int, length: int) -> Stepper:
        """The stepper of a kind of data and a shape, made when first asked for."""
        key = (kind, batch, length)
        if key not in self.steppers:
            self.steppers[key] = Stepper(
                self.model, self.gradients, self.ranks, batch, length,
                self.args.text_weight, self.pool,
            )  # fmt: skip
        return self.steppers[key]

    def text_jobs(self) -> Iterator[tuple[int, int, int]]:
        """Endless seeds and shapes of text batches: mostly the stage's length, some shorter."""
        while True:
            lengths = [s.length for s in self.stages if s.kind == "text"]
            now = self.stages[self.state.stage].length
            earlier = [n for n in lengths if n < now]
            if now == lengths[-1]:
                length = self.random.choices(FINAL_LENGTHS, FINAL_WEIGHTS)[0]
            elif earlier and self.random.random() < 0.35:
                length = self.random.choice(earlier)
            else:
                length = now
            tokens = max(self.args.text_tokens, length)
            self.state.text_jobs += 1
            job = self.state.text_jobs * self.ranks.count + self.ranks.rank
            yield self.args.seed * 10_000_019 + job, tokens // length, length

    def train_symbols(self, task: SymbolTask, batch: int, length: int) -> Stepper:
        """One step on symbols."""
        stepper = self.stepper("symbols", batch, length)
        drawn = symbol_batch(task, batch, length, self.generator, self.device)
        stepper.load(drawn.ids, drawn.kinds, None, None)
        self.update(stepper)
        return stepper

    def train_text(self, jobs: Iterator[tuple[int, int, int]]) -> Stepper:
        """One step on chats."""
        (_, batch, length), data = self.feed.get(jobs)
        stepper = self.stepper("text", batch, length)
        tensors = [
            torch.from_numpy(a.astype(np.int64))
            for a in (data.ids, data.kinds, data.spans, data.tasks)
        ]
        stepper.load(*tensors)
        self.update(stepper)
        return stepper

    def update(self, stepper: Stepper) -> None:
        """One step at the learning rate of now."""
        self.now = self.ranks.now()
        stepper.step()
        self.optimizer.step(self.rate())
        self.state.step += 1
        self.state.stage_steps += 1
        self.state.tokens += stepper.batch * stepper.length * self.ranks.count

    def run(self) -> None:
        """Train until the last stage's end or the time limit, whichever is first."""
        config = asdict(self.model.config)
        self.log(event="start", seed=self.args.seed, config=config, device=str(self.device))
        try:
            while self.state.stage < len(self.stages) and self.in_time():
                stage = self.stages[self.state.stage]
                done = self.run_symbols(stage) if stage.kind == "symbols" else self.run_text(stage)
                if done:
                    self.state.stage += 1
                    self.state.stage_steps = 0
        finally:
            self.save()
            self.feed.close()
        self.steppers.clear()  # with their graphs, see `close`
        self.ranks.close()
        if self.args.mean and self.ranks.first and self.elapsed >= self.args.time_limit:
            last = sorted((self.out / "exports").iterdir())[-self.args.mean :]
            export(average([load(f) for f in last]), self.out / "mean", self.args.tokenizer)

    def in_time(self) -> bool:
        """Whether there is time, and steps, left."""
        a = self.args
        self.now = self.ranks.now()
        if self.now - self.started > a.stop_after or self.state.step >= a.max_steps:
            return False
        return self.elapsed < a.time_limit

    def run_symbols(self, stage: Stage) -> bool:
        """One symbol stage; returns whether it came to its end."""
        batch = stage.tokens // stage.length
        while self.in_time():
            for _ in range(self.args.log_every):
                stepper = self.train_symbols(stage.symbols, batch, stage.length)
            stats, _, halves = stepper.read()
            copy, needle = (right / max(seen, 1) for right, seen in halves)
            self.state.macro = needle
            self.log(
                stage=self.state.stage, symbols=stage.length, loss=round(stats[0] / stats[2], 4),
                copy=round(copy, 4), needle=round(needle, 4),
            )  # fmt: skip
            if needle >= stage.target and copy >= 0.9:
                return True
            if self.is_over(stage):
                return True
        return False

    def run_text(self, stage: Stage) -> bool:
        """One text stage; returns whether it came to its end."""
        if self.args.compile and not self.compiled:
            compile_pieces()
            self.compiled = True
            self.steppers.clear()
        jobs = self.text_jobs()
        symbols = min(stage.length, 2048)
        while self.in_time():
            used: dict[tuple[int, int], Stepper] = {}
            window = self.now
            tokens = self.state.tokens
            for _ in range(self.args.log_every):
                if self.random.random() < self.args.symbol_share:
                    self.train_symbols(stage.symbols, self.args.text_tokens // symbols, symbols)
                stepper = self.train_text(jobs)
                used[(stepper.batch, stepper.length)] = stepper
            macro = self.report_text(used, stage, tokens, window)
            if self.now - self.last_save > self.args.save_every:
                self.save()
            if (macro is not None and macro >= stage.target) or self.is_over(stage):
                return True
        return False

    def is_over(self, stage: Stage) -> bool:
        """Whether a stage has had its time."""
        return self.elapsed > stage.until * self.args.time_limit

    def report_text(
        self, used: dict[tuple[int, int], Stepper], stage: Stage, tokens: int, window: float
    ) -> float | None:
        """Log every shape used since the last report; returns the stage's own mean accuracy."""
        macro: float | None = None
        for (_, length), stepper in sorted(used.items(), key=lambda item: item[0][1]):
            stats, exact, _ = stepper.read()
            scores = {
                name: round(exact[i][0] / exact[i][1], 3)
                for i, name in enumerate(mix.TRAIN_TASKS)
                if exact[i][1]
            }
            measured = [exact[i][0] / exact[i][1] for i in MEASURED if exact[i][1]]
            mean = sum(measured) / max(len(measured), 1)
            if length == stage.length:
                macro = self.state.macro = mean
            seconds = self.now - window
            self.log(
                stage=self.state.stage, text=length, answer_loss=round(stats[0] / stats[2], 4),
                text_loss=round(stats[1] / stats[2], 4), macro=round(mean, 4), scores=scores,
                rate=round((self.state.tokens - tokens) / seconds), lr=round(self.rate(), 6),
            )  # fmt: skip
        self.state.history.append(
            {
                "step": self.state.step,
                "tokens": self.state.tokens,
                "macro": macro,
                "length": stage.length,
            }
        )
        return macro


def parser() -> argparse.ArgumentParser:
    """The command line; its defaults are the recipe."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", type=Path, default=Path("build/reference"), help="checkpoints and logs")
    p.add_argument("--tokenizer", type=Path, required=True, help="folder of research.tokenizer")
    p.add_argument("--corpus", type=Path, required=True, help="file of research.corpus.tokens")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--time-limit", type=float, default=1440.0, help="seconds of all processes")
    p.add_argument("--stop-after", type=float, default=1e9, help="seconds of this process")
    p.add_argument("--save-every", type=float, default=90.0, help="seconds between checkpoints")
    p.add_argument(
        "--keep-exports", action="store_true", help="all of them, in OUT/exports, for their mean"
    )
    p.add_argument(
        "--mean", type=int, default=0, help="write OUT/mean in the end, of as many last exports"
    )
    p.add_argument("--max-steps", type=int, default=10**9)
    p.add_argument(
        "--decay-share", type=float, default=0.4, help="last share of the time; the rate falls"
    )
    p.add_argument("--resume", action="store_true", help="continue from what lies in OUT")
    p.add_argument(
        "--warm-start", type=Path, help="folder of an exported model to begin with, of any shape"
    )
    p.add_argument("--first-stage", type=int, default=0)
    p.add_argument("--workers", type=int, default=0, help="processes that make text batches")
    p.add_argument("--text-tokens", type=int, default=65536, help="tokens of a text step")
    p.add_argument("--text-rows", type=float, default=0.5, help="share of rows that are text alone")
    p.add_argument("--text-weight", type=float, default=1.0, help="weight of the text loss")
    p.add_argument("--symbol-share", type=float, default=0.02, help="symbol steps among text steps")
    p.add_argument("--log-every", type=int, default=50)
    p.add_argument("--compile", action="store_true", help="torch.compile the element-wise parts")
    p.add_argument("--cudnn", action="store_true", help="attend by cuDNN, faster on some GPUs")
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--intermediate-size", type=int, default=336)
    for name in ("hidden_size", "heads", "kv_heads", "head_dim"):
        p.add_argument(f"--{name.replace('_', '-')}", type=int)
    return p


def main() -> None:
    """Train."""
    torch.backends.cuda.matmul.allow_tf32 = True
    args = parser().parse_args()
    first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(first, set_priority=True) if args.cudnn else nullcontext():
        Trainer(args).run()


if __name__ == "__main__":
    main()
