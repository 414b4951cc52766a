# SPDX-License-Identifier: Apache-2.0
"""Servers shared by the end-to-end tests: each configuration is started once a session."""

import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import pytest
from cascading import small
from documents import cut_documents
from drafters import write_eagle, write_eagle3
from drafting import drafting_servers
from expected_mass import CHOSEN_TOKENS, PAPER
from host_tier import HOST_TIER_SERVERS, VERIFY
from live_server import LAUNCH_SERVER, MODEL, SGLANG, LiveServer, server_environment
from machine import HAS_GPU
from placed import PLACED_SERVERS
from server_host import Host
from streaming_heads import EQUALLY_STREAMING, STREAMING, WINDOW_TOKENS
from tensor_parallel import with_one_kv_head

from sglang_sparse.tasks import FileEncoder, TaskSuite

# Elsewhere the hierarchical cache is refused.
_OLDER = ["test_host_tier.py", "test_placement.py"]
collect_ignore = [] if version("sglang") == "0.5.17" else _OLDER
# What anchors reach, and so what the layers between them attend to, is the whole context.
EVERYTHING = {
    "budget": {"kind": "mass", "epsilon": 1.0, "cap": 4096, "microbatch": 64},
    "min_sparse_tokens": 64,
}
# A request may ask for anything up to the whole context.
CHOOSY = {
    "budget": {"kind": "tokens", "tokens": CHOSEN_TOKENS, "max_tokens": 32768},
    "min_sparse_tokens": 64,
}
KEPT = {
    "cadence": {"every": 4},
    "score": {"kind": "key_sketch", "refresh_every": 64},
    "page_size": 32,
}
TILES = {"kind": "tile_topk", "fraction": 0.1, "min_tokens": 256}
ALL_TILES = TILES | {"fraction": 1.0}
# No head of the layer that reuses lists takes its own; of two ranks, each has what its heads take.
WITHIN_RANKS = {"reuse": [{"layer": 3, "heads": [1, 0, 3, 3]}], "calibration": "uncalibrated"}
FLOOR = {"budget": {"floor": 128}}
MAPPED = FLOOR | {"min_sparse_tokens": 64, "prefill": TILES, "layers": WITHIN_RANKS}
BLOCKS = {"kind": "block_bounds", "fraction": 0.5, "floor": 256, "min_tokens": 256}
ALL_BLOCKS = BLOCKS | {"fraction": 1.0}
ONE_LIST = {
    "score": {"kind": "exact", "pool": "heads"},
    "budget": {"kind": "tokens", "tokens": 32768},
    "min_sparse_tokens": 64,
}
# The budget as shipped; a request may ask for the whole context.
ASKED = {"budget": {"max_fraction": 1.0}, "min_sparse_tokens": 64}
# Prompts see the windows in both. One has room for what a request may hold, and no more.
HELD: dict[str, dict[str, object]] = {
    "kept": {"prefill": ALL_BLOCKS | {"min_tokens": 1}},
    "given-back": {"retention": {"kind": "streaming_window", "share": WINDOW_TOKENS / 8192}},
}
WHOLE_MASS = {
    "budget": {"epsilon": 1.0, "cap": 32768, "estimator": "observed_min", "margin": 0},
    "min_sparse_tokens": 64,
    "cadence": {"every": 4},
}
BOUNDED = ["--disable-radix-cache"]
SPARSE = ["--attention-backend", "sparse", "--sparse-method"]
CASCADE = [*SPARSE, "cascade"]
PROBE = {"SGLANG_SPARSE_PROBE": "1"}
SOON = {"min_sparse_tokens": 64}


def sparse(method: str, config: dict[str, Any]) -> list[str]:
    """Flags of a method with other keys."""
    return [*SPARSE, method, "--sparse-config", json.dumps(config)]


PSA = [
    *sparse("psa", SOON | PAPER),
    *("--enable-metrics", "--decode-log-interval", "2", "--disable-cuda-graph"),
]
CONFIGURATIONS: dict[str, tuple[list[str], dict[str, str]]] = {
    "dense": ([*("--chunked-prefill-size", "2048"), *("--page-size", "64")], {}),
    # The probe compares every decode step with dense attention; it cannot look into a graph.
    "sparcas": ([*sparse("sparcas", CHOOSY), "--disable-cuda-graph"], PROBE),
    # With everything that an operator may switch on.
    "page_minmax": (
        [
            *sparse("page_minmax", CHOOSY | {"min_sparse_tokens": 512}),
            *("--enable-metrics", "--enable-cache-report"),
            # Prompts of an evaluation in chunks, which forced decoding has to tell apart.
            *("--enable-custom-logit-processor", "--chunked-prefill-size", "512"),
            "--disable-cuda-graph",
        ],
        PROBE | VERIFY,
    ),
    # Selections kept over four steps, channels over all: every kind of state that outlives a step;
    # prompts in many chunks, and a pool that three of them overfill.
    "sparcas-kept": (
        [
            *sparse("sparcas", CHOOSY | KEPT),
            *("--chunked-prefill-size", "1024", "--max-total-tokens", "8192", "--enable-metrics"),
        ],
        {},
    ),
    # Requests come in through two processes.
    "tokenizers": (
        [*sparse("sparcas", CHOOSY), "--tokenizer-worker-num", "2"],
        # Connections are kept from test to test. A process that is imported says nothing meanwhile.
        {
            "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
            "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "200",
        },
    ),
    # A share of one is reached by nothing less than the whole context; kept over four steps.
    "psa-everything": (sparse("psa", WHOLE_MASS), {}),
    "psa": (PSA, PROBE),
    # Heads of both kinds, in prompts too; lists are kept over four steps.
    "streaming": (
        [
            *sparse(
                "page_minmax",
                CHOOSY | {"heads": STREAMING, "cadence": {"every": 4}, "prefill": BLOCKS},
            ),
            *("--chunked-prefill-size", "1024", "--enable-metrics", "--disable-cuda-graph"),
        ],
        PROBE | VERIFY,
    ),
    # As shipped, but sparse from the start.
    "lserve": ([*sparse("lserve", SOON), "--disable-cuda-graph"], PROBE),
    "psa-shipped": (sparse("psa", SOON), {}),
    # Windows as long as the context, beside lists that stop at a share of one.
    "streaming-everything": (
        [
            *sparse(
                "psa", WHOLE_MASS | {"heads": STREAMING | {"local": 32768}, "prefill": ALL_BLOCKS}
            ),
            *("--chunked-prefill-size", "1024", "--tp", "2", "--disable-cuda-graph"),
        ],
        {},
    ),
    # A share of the mass over single tokens; everything else as shipped.
    "psa_sketch": ([*sparse("psa_sketch", SOON), "--disable-cuda-graph"], PROBE),
    **drafting_servers(CHOOSY, KEPT),
    # Two ranks, which speak through gloo on a CPU; the dense layer's heads are whole on each.
    "psa-ranks": ([*PSA, "--tp", "2"], PROBE | VERIFY),
    # One KV head that both ranks replicate, and one rank that has it twice.
    "psa-copies": ([*PSA, "--model-path", "{MODELS}/heads-1", "--tp", "2"], PROBE | VERIFY),
    "psa-twice": ([*PSA, "--model-path", "{MODELS}/heads-2"], PROBE | VERIFY),
    # Prompts and decoding sparse; prompts in many chunks.
    "kascade": (
        [
            *sparse("kascade", FLOOR | SOON | {"prefill": TILES}),
            *("--chunked-prefill-size", "256", "--enable-metrics", "--disable-cuda-graph"),
        ],
        PROBE,
    ),
    # The same with another head map, on one rank and on two.
    **{
        f"kascade-mapped{name}": (
            [
                *sparse("kascade", MAPPED),
                *("--chunked-prefill-size", "256", "--disable-cuda-graph", *ranks),
            ],
            PROBE,
        )
        for name, ranks in (("", ()), ("-ranks", ("--tp", "2")))
    },
    # With the map of the preset, prompts in one chunk.
    "kascade-whole": (
        [*sparse("kascade", FLOOR | SOON | {"prefill": TILES}), "--chunked-prefill-size", "4096"],
        {},
    ),
    "kascade-shipped": (sparse("kascade", ASKED), {}),
    "kascade-sketch-shipped": (sparse("kascade_sketch", ASKED), {}),
    "kascade-sketch-everything": (
        [
            *sparse("kascade_sketch", EVERYTHING | {"prefill": ALL_TILES}),
            *("--chunked-prefill-size", "4096"),
        ],
        {},
    ),
    "cascade": ([*CASCADE, *small(), *BOUNDED, "--chunked-prefill-size", "2048"], {}),
    "cascade-ranks": ([*CASCADE, *small(), *BOUNDED, "--tp", "2"], {}),
    # The preset as shipped, and chunks that end inside of strides.
    "cascade-chunks": (
        [*CASCADE, *BOUNDED, "--chunked-prefill-size", "320", "--enable-metrics"],
        {},
    ),
    # Two prefixes, so that later ones take the place of earlier ones.
    "cascade-prefixes": (
        [
            *CASCADE,
            *small(snapshots=2),
            *("--chunked-prefill-size", "1024", "--enable-cache-report"),
        ],
        {},
    ),
    # Fewer token slots than three requests end with, though enough to begin them: one is retracted.
    "cascade-retracts": (
        [
            *CASCADE,
            *small(snapshots=2),
            *("--chunked-prefill-size", "640", "--max-total-tokens", "4992"),
            *("--schedule-conservativeness", "0.01", "--enable-metrics"),
        ],
        {},
    ),
    "cascade-whole": (
        [
            *CASCADE,
            *BOUNDED,
            *("--sparse-config", '{"retention": {"window": 4096, "stride": 1024}}'),
            *("--chunked-prefill-size", "1024"),
        ],
        {},
    ),
    # The same heads with and without windows of their own; a pool that a few prompts overfill.
    **{
        f"windows-{held}": (
            [
                *sparse("page_minmax", CHOOSY | EQUALLY_STREAMING | more),
                *("--chunked-prefill-size", "512", "--max-total-tokens", "8192"),
                *("--enable-cache-report", "--disable-overlap-schedule"),
            ],
            VERIFY,
        )
        for held, more in HELD.items()
    },
    # One list for all heads, which every layer reads through a map.
    "kascade-heads-everything": (
        [
            *sparse("kascade", ONE_LIST | {"prefill": ALL_TILES}),
            *("--chunked-prefill-size", "4096", "--disable-cuda-graph"),
        ],
        {},
    ),
    **HOST_TIER_SERVERS,
    **PLACED_SERVERS,
}

# Every preset beside fp8 KV, with lists that hold the whole context.
FP8_KV = ("--kv-cache-dtype", "fp8_e4m3")
WHOLE_CONTEXT: dict[str, dict[str, object]] = {
    "sparcas": {"budget": {"tokens": 32768}},
    "page_minmax": {"budget": {"tokens": 32768}},
    "psa": {"budget": {"epsilon": 1.0, "cap": 32768}},
    "psa_sketch": {"budget": {"epsilon": 1.0, "cap": 4096}},
    "kascade": {"budget": {"fraction": 1.0}, "prefill": ALL_TILES},
    "kascade_sketch": {"budget": {"fraction": 1.0}, "prefill": ALL_TILES},
    "lserve": {"budget": {"tokens": 32768}, "heads": {"local": 32768}},
}
CONFIGURATIONS["dense-fp8"] = (["--page-size", "64", *FP8_KV], {})
CONFIGURATIONS |= {
    f"{method}-fp8": ([*sparse(method, c | SOON), *FP8_KV], VERIFY)
    for method, c in WHOLE_CONTEXT.items()
}
# Beside the same servers of one rank.
CONFIGURATIONS |= {
    f"{name}-ranks": ([*CONFIGURATIONS[name][0], "--tp", "2"], CONFIGURATIONS[name][1])
    for name in ("sparcas-fp8", "sparcas-chains")
}

LENGTHS = (1003, 1751, 2503, 3251, 3989)
# Servers at once. One of two ranks takes 2 GiB and more; both versions are tested side by side.
MOST_RUNNING = 3
# Started by a command that users type; the others are forked, which takes a fraction of it.
COMMANDS = {"sparcas-kept": [SGLANG, "serve"]}
# So that a server is started once: those that tests share are last in one file, first in the next.
FILES = (
    *("evaluate", "loadtest", "requests", "tokenizers"),
    *("programs", "outputs", "metrics", "prefixes"),
    *("ranks", "kascade", "speculation", "fp8_kv", "host_tier", "lserve"),
    *("windows", "placement", "cascade"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of this folder in the order of :data:`FILES`, behind all others."""
    names = [f"test_{name}" for name in FILES]
    items.sort(key=lambda i: names.index(i.path.stem) + 1 if "e2e" in i.path.parts else 0)


@pytest.fixture(scope="session")
def forking() -> Iterator[Host | None]:
    """What forks servers; None where there is a GPU."""
    # Importing may touch CUDA, which does not survive a fork.
    host = None if HAS_GPU else Host(server_environment({}))
    yield host
    if host is not None:
        host.close()


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, forking: Host | None
) -> Iterator[Callable[[str], LiveServer]]:
    """``server(name)``: the running server of one of :data:`CONFIGURATIONS`."""
    logs = tmp_path_factory.mktemp("servers")
    running: dict[str, LiveServer] = {}
    models = tmp_path_factory.mktemp("models")
    write_eagle(models / "eagle")
    write_eagle3(models / "eagle3")
    for copies in (1, 2):
        with_one_kv_head(copies, models / f"heads-{copies}")

    def start(name: str) -> LiveServer:
        live = running.pop(name, None)
        if live is None:
            if len(running) == MOST_RUNNING:
                running.pop(next(iter(running))).close()
            args, env = CONFIGURATIONS[name]
            args = [arg.replace("{MODELS}", str(models)) for arg in args]
            command = COMMANDS.get(name, LAUNCH_SERVER)
            host = None if name in COMMANDS else forking
            live = LiveServer(args, logs / f"{name}.log", env, command, host).wait_until_up()
        running[name] = live  # the last one is the one used last
        return live

    yield start
    for live in running.values():
        live.close()


@pytest.fixture(scope="session")
def suite() -> TaskSuite:
    """Tasks that the reference model was not trained on."""
    return TaskSuite(FileEncoder(MODEL), split="heldout")


@pytest.fixture(scope="session")
def prompts(suite: TaskSuite) -> list[list[int]]:
    """Twenty prompts of 1K to 4K tokens: four documents cut at five lengths."""
    return cut_documents(suite, LENGTHS, 4)
