# SPDX-License-Identifier: Apache-2.0
"""`lm-eval` tasks over the server's completions API, once an arm; for users with a network.

Only tasks that generate say anything about sparse decoding. Those that score given answers read
input log-probabilities, which come from the prefill.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from sglang_sparse.config import ConfigError
from sglang_sparse.evaluate.arms import Arm
from sglang_sparse.evaluate.client import Server


def command(server: Server, tokenizer: str, tasks: str, arm: Arm, out: Path) -> list[str]:
    """The `lm_eval` command line of one arm."""
    model = ",".join(
        (
            f"model={server.model}",
            f"base_url={server.base_url}/v1/completions",
            f"tokenizer={tokenizer}",
            "num_concurrent=8",
        )
    )
    return [
        *("lm_eval", "--model", "local-completions", "--model_args", model),
        *("--tasks", tasks, "--gen_kwargs", json.dumps({"custom_params": arm.custom_params})),
        *("--output_path", str(out / f"lm-eval-{arm.name}")),
    ]


def run(server: Server, tokenizer: str, tasks: str, arms: list[Arm], out: Path) -> None:
    """Run every arm; lm-eval prints its own tables and writes its own files under `out`.

    Raises:
        ConfigError: lm-eval is not installed, or failed.
    """
    for arm in arms:
        line = command(server, tokenizer, tasks, arm, out)
        installed = shutil.which(line[0]) is not None
        if not installed or subprocess.run(line, check=False).returncode:
            raise ConfigError(
                flag="--lm-eval",
                value=tasks,
                problem="it failed, see above" if installed else "lm_eval is not installed",
                allowed="task names of lm-eval, with its package and a network",
                remedy="pip install 'lm-eval[api]', or drop --lm-eval",
            )
