# SPDX-License-Identifier: Apache-2.0
"""`make serve`: SGLang's own server with sparse attention, on the model that the repository ships.

Every argument goes to `sglang.launch_server`, after the ones set here, so `--port 31000` or
`--sparse-method page_minmax` win over them.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from sglang_sparse.config import configs_dir

MODEL_NAME = "reference"
DEFAULT_ARGS = ["--attention-backend", "sparse", "--sparse-method", "sparcas"]
# A fact, thousands of tokens of filler, and a question about the fact.
FACT = "The magic number for amber-violin is 58808."
FILLER = (
    " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
FILLER_REPEATS = 200
QUESTION = "\n\nWhat is the magic number for amber-violin?"
MAX_TOKENS = 24
POLL_SECONDS = 0.5


def server_command(args: Sequence[str], *, model: Path) -> list[str]:
    """Return the command line of the server; `args` come last and win."""
    command = [sys.executable, "-m", "sglang.launch_server"]
    command += ["--model-path", str(model), "--served-model-name", MODEL_NAME]
    return [*command, *DEFAULT_ARGS, "--host", "127.0.0.1", "--port", "30000", *args]


def server_url(command: Sequence[str]) -> str:
    """Return the address that `command` will serve on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host")
    parser.add_argument("--port")
    known, _ = parser.parse_known_args(command)
    host = "127.0.0.1" if known.host in ("0.0.0.0", "::") else known.host
    return f"http://{host}:{known.port}"


def example_lines(url: str) -> list[str]:
    """Return a shell line with curl and one with the OpenAI client, ready to paste."""
    content = f"{FACT}%s{QUESTION}"
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    # printf reads the backslash of a JSON escape, hence twice.
    template = shlex.quote(json.dumps(body).replace("\\", "\\\\"))
    filler = f"$(printf {shlex.quote(f'{FILLER}%.0s')} $(seq {FILLER_REPEATS}))"
    curl = f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d @-"
    program = (
        f"import openai; prompt = {FACT!r} + {FILLER!r} * {FILLER_REPEATS} + {QUESTION!r}; "
        f"client = openai.OpenAI(base_url={f'{url}/v1'!r}, api_key='none'); "
        f"answer = client.chat.completions.create(model={MODEL_NAME!r}, max_tokens={MAX_TOKENS}, "
        "temperature=0, messages=[{'role': 'user', 'content': prompt}]); "
        "print(answer.choices[0].message.content)"
    )
    return [
        f'printf {template} "{filler}" | {curl}',
        # Double quotes, since the program is full of single ones and has nothing that they expand.
        f'{shlex.quote(sys.executable)} -c "{program}"',
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Start the server, say how to talk to it once it answers, and return its exit status.

    A server that a signal ended returns 128 and the signal's number, as in a shell.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    args = args[1:] if args[:1] == ["--"] else args
    model = (configs_dir() / MODEL_NAME / "model").resolve()
    if not (model / "config.json").is_file():
        print(
            f"error: no model at {model}; it is part of a checkout and of no wheel; "
            "clone the repository, or start sglang.launch_server on a model of your own",
            file=sys.stderr,
        )
        return 2
    command = server_command(args, model=model)
    print(shlex.join(command), flush=True)
    # In a session of its own, so that Ctrl-C reaches it once: through the handler below.
    server = subprocess.Popen(command, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: server.send_signal(received))
    url = server_url(command)
    if _wait_until_healthy(server, url):
        print("\nThe server is up. Paste one of these into another shell:\n")
        print("\n\n".join(example_lines(url)), flush=True)
    status = server.wait()
    return status if status >= 0 else 128 - status


def _wait_until_healthy(server: subprocess.Popen[bytes], url: str) -> bool:
    """Return True when the server answers, False when it has ended instead."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_SECONDS)
    return False


if __name__ == "__main__":
    sys.exit(main())
