# SPDX-License-Identifier: Apache-2.0
"""Runs the studies of the reference model's card, presets and calibrations side by side.

``python -m sglang_sparse.research.measure --corpus tokens.xz --out build/studies``

Each study is a process of its own, and a GPU has several at a time. Results and logs go to
``--out``; those that ended there are not measured again. ``research.publish`` puts them into the
repository. Of a new model, calibrate first (``--only kascade lserve gates``), and copy the presets
that came of it to ``configs/reference``: the other studies measure what lies there. A calibration
begins with the shipped preset, of which it changes no more than what it finds. Sweeps that
presets were chosen by (``mass_study``, ``host_frames``, ``prefix_lists``) are not among them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from sglang_sparse.config import configs_dir
from sglang_sparse.tasks import TASKS

_RESEARCH = "sglang_sparse.research."


@dataclass(frozen=True)
class Job:
    """One study.

    Attributes:
        name: Of its files in the output folder.
        module: What is run, below ``sglang_sparse.research`` or, with a dot, whole.
        arguments: Its command line; ``{model}``, ``{corpus}`` and ``{out}`` are filled in.
    """

    name: str
    module: str
    arguments: str

    def command(self, model: Path, corpus: Path, out: Path) -> list[str]:
        """The process to start."""
        module = self.module if "." in self.module else _RESEARCH + self.module
        filled = (a.format(model=model, corpus=corpus, out=out) for a in self.arguments.split())
        return [sys.executable, "-m", module, *filled]


def _table(length: int, budgets: str, count: int) -> Job:
    name = f"table_{length // 1024}k"
    return Job(
        name, "study",
        f"--model {{model}} --parts table --lengths {length} --tasks {','.join(TASKS)} "
        f"--budgets {budgets} --count {count} --out {{out}}/{name}.json",
    )  # fmt: skip


def _shipped(length: int, count: int) -> Job:
    name = f"shipped_{length // 1024}k"
    arguments = f"--model {{model}} --lengths {length} --count {count} --out {{out}}/{name}.json"
    return Job(name, "shipped", arguments)


_TASKS = " ".join(TASKS)
_LSERVE = "calibrate lserve --model {model} --sink 64 --local 256 --count 14 --seed 1"
_CASCADE = "--model {model} --stride 1024 --reduce max"
# The longest first.
JOBS = (
    Job(
        "kascade", "sglang_sparse.cli",
        "calibrate kascade --model {model} --anchors 5 --count 24 --importance effect --seed 0 "
        "--output {out}/kascade.json --report {out}/kascade",
    ),
    Job(
        "lserve", "sglang_sparse.cli",
        f"{_LSERVE} --max-tokens 4096 --sparsity 0.42 --check leave-one-out "
        "--output {out}/lserve.json --report {out}/lserve",
    ),
    Job(
        "gates", "sglang_sparse.cli",
        f"{_LSERVE} --max-tokens 1024 --finder gates --steps 64 "
        "--output {out}/gates.json --report {out}/gates",
    ),
    _shipped(32768, 20),
    _shipped(16384, 40),
    _table(8192, "32,64,128,256,410,512,1638", 100),
    _table(16384, "32,64,128,256,819,3277", 60),
    _table(32768, "32,64,256,1638,6554", 30),
    _shipped(8192, 60),
    Job(
        "presets", "preset_study",
        f"--model {{model}} --count 48 --tasks {_TASKS} --out {{out}}/presets.json "
        "--table {out}/presets.md",
    ),
    _table(4096, "32,64,128,205,256,512,819", 100),
    _shipped(4096, 60),
    Job(
        "decode", "text_decode",
        "--model {model} --corpus {corpus} --out {out}/decode.json --count 48 "
        "--positions 1024 2048 4096 8192 16384 32000 --budgets 32 64 128 256 512 1024",
    ),
    Job(
        "accuracy", "kascade",
        "--model {model} --count 50 --lengths 4096 --out {out}/accuracy.json",
    ),
    Job(
        "passkeys", "cascade_study",
        f"{_CASCADE} --mentions 6 --lengths 8192 16384 32768 --texts 0 --out {{out}}/passkeys.json",
    ),
    Job(
        "texts", "cascade_study",
        f"{_CASCADE} --mentions --lengths 8192 --texts 8 --out {{out}}/texts.json",
    ),
    Job(
        "fp8", "fp8_study",
        "--model {model} --length 1024 --count 120 --token-batch 262144 --out {out}/fp8_marks.json "
        "--report {out}/fp8.json",
    ),
    Job(
        "cascade_decode", "cascade_decode",
        "--model {model} --mentions 6 --out {out}/cascade_decode.json",
    ),
    Job(
        "refresh", "refresh_study",
        "--model {model} --out {out}/refresh.json --table {out}/refresh.md",
    ),
    Job(
        "arms", "heads_study",
        f"--model {{model}} --count 24 --lengths 4096 --tasks {_TASKS} --out {{out}}/arms.json",
    ),
    Job(
        "text", "text_study",
        "--model {model} --corpus {corpus} --out {out}/text.json --baselines {out}/baselines.json",
    ),
    Job(
        "ablation_4k", "study",
        "--model {model} --parts ablation --lengths 4096 --count 60 --out {out}/ablation_4k.json",
    ),
)  # fmt: skip


def begin_presets(out: Path) -> None:
    """Put the shipped presets where calibrations write; one that lies there stays."""
    out.mkdir(parents=True, exist_ok=True)
    for preset in ("kascade.json", "lserve.json"):
        if not (out / preset).exists():
            shutil.copy(configs_dir() / "reference" / preset, out)


def run(
    jobs: Sequence[Job], *, model: Path, corpus: Path, out: Path, slots: Sequence[str]
) -> list[str]:
    """Run what has not ended in ``out`` yet; returns the names of those that failed.

    Args:
        slots: For each process that may run at a time, its ``CUDA_VISIBLE_DEVICES``.
    """
    out.mkdir(parents=True, exist_ok=True)
    free: SimpleQueue[str] = SimpleQueue()
    for slot in slots:
        free.put(slot)

    def measure(job: Job) -> bool:
        ended = out / f"{job.name}.ended"
        if ended.exists():
            return True
        slot, started = free.get(), time.monotonic()
        with (out / f"{job.name}.log").open("w") as log:
            code = subprocess.run(
                job.command(model, corpus, out),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": slot},
                check=False,
            ).returncode
        free.put(slot)
        seconds = time.monotonic() - started
        print(f"{job.name}: {'done' if code == 0 else 'FAILED'} in {seconds:.0f} s", flush=True)
        if code == 0:
            ended.touch()
        return code == 0

    with ThreadPoolExecutor(len(slots)) as pool:
        done = list(pool.map(measure, jobs))
    return [job.name for job, good in zip(jobs, done, strict=True) if not good]


def main() -> None:
    """Measure, and say which studies failed."""
    names = [job.name for job in JOBS]
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--model", type=Path, default=Path("configs/reference/model"))
    p.add_argument("--corpus", type=Path, required=True, help="file of research.corpus.tokens")
    p.add_argument("--out", type=Path, default=Path("build/studies"))
    p.add_argument("--only", nargs="+", choices=names, default=names, help="some studies")
    p.add_argument("--side-by-side", type=int, default=6, help="processes on each GPU")
    args = p.parse_args()
    begin_presets(args.out)
    gpus = [str(gpu) for gpu in range(torch.cuda.device_count())] or [""]
    failed = run(
        [job for job in JOBS if job.name in args.only],
        model=args.model, corpus=args.corpus, out=args.out, slots=gpus * args.side_by_side,
    )  # fmt: skip
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; their logs are in {args.out}")


if __name__ == "__main__":
    main()
