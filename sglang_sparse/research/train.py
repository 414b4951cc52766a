# SPDX-License-Identifier: Apache-2.0
"""Trains the reference model, resumably: ``python -m sglang_sparse.research.train --help``.

Symbols first, at 64 tokens, then longer; then chats over text with needles, from 256 to 32K tokens.
A stage ends when its accuracy is there. Seeds, stages, losses and accuracies go to ``log.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_sparse.research import mix
from sglang_sparse.research.curriculum import (
    FINAL_LENGTHS,
    FINAL_WEIGHTS,
    Stage,
    TextFeed,
    curriculum,
)
from sglang_sparse.research.export import export, load
from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.research.step import Stepper, compile_pieces
from sglang_sparse.research.symbols import SymbolTask, symbol_batch
from sglang_sparse.tasks.encoding import FileEncoder

RETRIEVAL = tuple(
    mix.TRAIN_TASKS.index(t)
    for t in (
        "single_key",
        "multi_key",
        "multi_value",
        "multi_query",
        "passkey",
        "variable_tracking",
    )
)


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
    macro: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Runs the curriculum until the time is up."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.encoder = FileEncoder(args.tokenizer)
        self.feed = TextFeed(args.tokenizer, args.workers, args.text_share)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        geometry = {
            k: v for k, v in vars(args).items() if k in ModelConfig.__dataclass_fields__ and v
        }
        self.config = ModelConfig(vocab_size=self.encoder.vocab_size, **geometry)
        model = load(args.warm_start) if args.warm_start else ReferenceModel(self.config, args.seed)
        self.model = model.to(self.device)
        self.state = State(args.seed, stage=args.first_stage)
        cuda = self.device.type == "cuda"
        decayed = [p for p in self.model.parameters() if p.dim() == 2]
        others = [p for p in self.model.parameters() if p.dim() != 2]
        rate: Any = torch.tensor(args.lr, device=self.device) if cuda else args.lr
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}],
            lr=rate,
            betas=(0.9, 0.98),
            eps=1e-8,
            fused=cuda,
            capturable=cuda,
        )
        self.digit_of = torch.full((self.encoder.vocab_size,), -1, device=self.device)
        for digit in range(10):
            self.digit_of[self.encoder.token_id(str(digit))] = digit
        self.stages = curriculum(self.encoder.vocab_size, args.text_tokens)
        self.steppers: dict[tuple[str, int, int], Stepper] = {}
        self.pool = torch.cuda.graph_pool_handle() if cuda else None
        self.compiled = False
        self.started = self.last_save = time.monotonic()
        self.log_file = (self.out / "log.jsonl").open("a")
        checkpoint = self.out / "checkpoint.pt"
        if args.resume and checkpoint.exists():
            self.restore(checkpoint)
        self.generator = torch.Generator(device=self.device)
        self.generator.manual_seed(args.seed * 1_000_003 + self.state.step)
        self.random = random.Random(args.seed * 7919 + self.state.step)
        self.base_seconds = self.state.seconds

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint."""
        saved = torch.load(path, map_location=self.device, weights_only=False)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state = State(**saved["state"])
        self.log(event="resumed")

    def save(self) -> None:
        """Write a checkpoint and an export."""
        path = self.out / "checkpoint.pt"
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": asdict(self.state),
        }
        torch.save(saved, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
        export(self.model, self.out / "export", self.encoder)
        (self.out / "state.json").write_text(json.dumps(asdict(self.state)))
        self.last_save = time.monotonic()

    def log(self, **entry: Any) -> None:
        """One JSON line to the log and to standard output."""
        entry = {"step": self.state.step, "seconds": round(self.elapsed, 1), **entry}
        line = json.dumps(entry)
        print(line, flush=True)
        self.log_file.write(line + "\n")
        self.log_file.flush()

    @property
    def elapsed(self) -> float:
        """Seconds since this process began training."""
        return time.monotonic() - self.started

    def rate(self) -> float:
        """Learning rate: warm-up over 100 steps, then flat, then linear decay if asked for."""
        rate = self.args.lr * min(1.0, (self.state.step + 1) / 100)
        if self.args.decay_from is not None:
            span = max(self.args.time_limit - self.args.decay_from, 1.0)
            left = (self.args.time_limit - self.elapsed) / span
            rate *= 0.03 + 0.97 * min(max(left, 0.0), 1.0)
        return rate

    def stepper(self, kind: str, batch: int, length: int) -> Stepper:
        """The stepper of a kind of data and a shape, made when first asked for."""
        key = (kind, batch, length)
        if key not in self.steppers:
            digit_of = self.digit_of if kind == "text" and self.args.spread > 0 else None
            self.steppers[key] = Stepper(
                self.model, self.optimizer, batch, length, self.args.text_weight, self.pool,
                digit_of, self.args.spread,
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
            yield self.args.seed * 10_000_019 + self.state.text_jobs, tokens // length, length

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
        """Set the learning rate and step."""
        rate = self.rate()
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        stepper.step()
        self.state.step += 1
        self.state.stage_steps += 1
        self.state.tokens += stepper.batch * stepper.length

    def run(self) -> None:
        """Train until the last stage's end or the time limit, whichever is first."""
        self.log(
            event="start", seed=self.args.seed, config=asdict(self.config), device=str(self.device)
        )
        try:
            while self.state.stage < len(self.stages) and self.in_time():
                stage = self.stages[self.state.stage]
                done = self.run_symbols(stage) if stage.kind == "symbols" else self.run_text(stage)
                if done:
                    self.state.stage += 1
                    self.state.stage_steps = 0
        finally:
            self.state.seconds = self.base_seconds + self.elapsed
            self.save()
            self.feed.close()

    def in_time(self) -> bool:
        """Whether there is time, and steps, left."""
        return self.elapsed < self.args.time_limit and self.state.step < self.args.max_steps

    def run_symbols(self, stage: Stage) -> bool:
        """One symbol stage; returns whether it came to its end."""
        began = time.monotonic()
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
            if time.monotonic() - began > stage.seconds and needle > 0.6:
                return True
        return False

    def run_text(self, stage: Stage) -> bool:
        """One text stage; returns whether it came to its end."""
        if self.args.compile and not self.compiled:
            compile_pieces()
            self.compiled = True
            self.steppers.clear()
        began, jobs = time.monotonic(), self.text_jobs()
        symbols = min(stage.length, 2048)
        while self.in_time():
            used: dict[tuple[int, int], Stepper] = {}
            window = time.monotonic()
            tokens = self.state.tokens
            for _ in range(self.args.log_every):
                if self.random.random() < self.args.symbol_share:
                    self.train_symbols(stage.symbols, self.args.text_tokens // symbols, symbols)
                stepper = self.train_text(jobs)
                used[(stepper.batch, stepper.length)] = stepper
            macro = self.report_text(used, stage, tokens, window)
            if time.monotonic() - self.last_save > 90:
                self.save()
            if macro is not None and macro >= stage.target:
                return True
            if time.monotonic() - began > stage.seconds:
                return True
        return False

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
            retrieval = [exact[i][0] / exact[i][1] for i in RETRIEVAL if exact[i][1]]
            mean = sum(retrieval) / max(len(retrieval), 1)
            if length == stage.length:
                macro = self.state.macro = mean
                if self.args.spread > 0 and stats[4] / stats[2] < 0.8:
                    macro = min(macro, 0.9)
            seconds = time.monotonic() - window
            self.log(
                stage=self.state.stage, text=length, answer_loss=round(stats[0] / stats[2], 4),
                text_loss=round(stats[1] / stats[2], 4), macro=round(mean, 4), scores=scores,
                spread=round(stats[3] / stats[2], 3), read=round(stats[4] / stats[2], 3),
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
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", type=Path, default=Path("build/reference"), help="checkpoints and logs")
    p.add_argument("--tokenizer", type=Path, default=Path("configs/reference/model"))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--time-limit", type=float, default=1800.0, help="seconds")
    p.add_argument("--max-steps", type=int, default=10**9)
    p.add_argument("--decay-from", type=float, help="seconds after which the rate falls to 3 %%")
    p.add_argument(
        "--resume", action="store_true", help="continue from OUT/checkpoint.pt if it is there"
    )
    p.add_argument("--warm-start", type=Path, help="folder of an exported model to begin with")
    p.add_argument("--first-stage", type=int, default=0)
    p.add_argument("--workers", type=int, default=0, help="processes that make text batches")
    p.add_argument("--text-tokens", type=int, default=65536, help="tokens of a text step")
    p.add_argument("--text-weight", type=float, default=0.5, help="weight of the text loss")
    p.add_argument("--text-share", type=float, default=1.0, help="rows whose text is learnt too")
    p.add_argument(
        "--spread", type=float, default=0.0, help="weight of the loss that spreads reading"
    )
    p.add_argument("--symbol-share", type=float, default=0.1)
    p.add_argument("--log-every", type=int, default=50)
    p.add_argument("--compile", action="store_true", help="torch.compile the element-wise parts")
    for name in ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim"):
        p.add_argument(f"--{name.replace('_', '-')}", type=int)
    return p


def main() -> None:
    """Train."""
    torch.backends.cuda.matmul.allow_tf32 = True
    Trainer(parser().parse_args()).run()


if __name__ == "__main__":
    main()
