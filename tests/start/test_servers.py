# SPDX-License-Identifier: Apache-2.0
"""Starts of whole servers: with the fewest flags, and one that is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import MODEL, LiveServer
from machine import HAS_GPU

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


SPARSE = ["--attention-backend", "sparse", "--sparse-method", "sparcas"]


@pytest.fixture(scope="module")
def plain_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LiveServer]]:
    """Servers started with no flag but those that a user must give."""
    logs = tmp_path_factory.mktemp("plain")
    flags = {"sparse": ["--attention-backend", "sparse", "--sparse-method", "page_minmax"]}
    servers = {
        name: LiveServer(args, logs / name, base=["--model-path", str(MODEL)])
        for name, args in (flags | {"dense": []}).items()
    }
    try:
        for server in servers.values():
            server.wait_until_up()
        yield servers
    finally:
        for server in servers.values():
            server.close()


@pytest.mark.parametrize("name", ["sparse", "dense"])
def test_two_flags_and_a_model_start_a_server_on_any_machine(
    plain_servers: dict[str, LiveServer], name: str
) -> None:
    server = plain_servers[name]
    [answer] = server.generate([list(range(5, 605))], 4)
    assert len(answer["output_ids"]) == 4
    info = server.call("/server_info")
    assert ("sparse" in info["internal_states"][0]) == (name == "sparse")
    if not HAS_GPU:
        assert info["device"] == "cpu"
        assert info["disable_overlap_schedule"]
        assert info["attention_backend"] == ("sparse" if name == "sparse" else "torch_native")
        assert info["max_total_num_tokens"] == 65536


def test_a_refused_start_exits_with_an_error_status(tmp_path: Path) -> None:
    live = LiveServer([*SPARSE, "--sparse-config", '{"nonsense": 1}'], tmp_path / "log")
    try:
        assert live.wait_until_ended() != 0
    finally:
        live.close()
    refusals = [
        line for line in live.log.read_text().splitlines() if "sglang-sparse: error" in line
    ]
    assert len(refusals) == 1
