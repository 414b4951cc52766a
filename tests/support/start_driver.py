# SPDX-License-Identifier: Apache-2.0
"""How starts end: command lines parsed as `launch_server` parses them, in one process."""

import json
import subprocess
import sys

# Parses many command lines in one process, as `launch_server` would each: loading SGLang is slow.
# What must happen before plugins are loaded happens in a copy of it.
DRIVER = """
import contextlib, io, json, os, sys
import sglang.srt.mem_cache.kv_cache_configurator as configurator
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

def outcome(args, prepare=lambda: None):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            prepare()
            load_plugins()
            prepare_server_args(args)
        return ["started", ""]
    except SystemExit as end:
        return [str(end.code), said.getvalue()]
    except Exception as error:
        return [type(error).__name__, str(error)]

def outcome_in_a_copy(args, prepare):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps(outcome(args, prepare)).encode())
        os._exit(0)
    os.wait()
    return json.loads(os.read(reader, 65536))

def lose_a_hook():
    from sglang_sparse import pools
    del configurator.KVCacheConfigurator._build_mha_kv_pool

def leave_plugins_out():
    os.environ["SGLANG_PLUGINS"] = "none"

def ask_for_grpc():
    os.environ["SGLANG_GRPC_PORT"] = "50051"

request = json.load(sys.stdin)
results = {}
copies = {
    "lost hook": lose_a_hook,
    "no plugin": leave_plugins_out,
    "gRPC by the environment": ask_for_grpc,
}
for name, prepare in copies.items():
    results[name] = outcome_in_a_copy(request[name], prepare)
for name, args in request.items():
    if name not in results:
        results[name] = outcome(args)
print("RESULTS" + json.dumps(results))
"""


def outcomes_of(request: dict[str, list[str]]) -> dict[str, list[str]]:
    """How each command line ended (a status, an exception's name, or "started") and its words."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    )
    results: dict[str, list[str]] = json.loads(done.stdout.rsplit("RESULTS", 1)[1])
    return results
