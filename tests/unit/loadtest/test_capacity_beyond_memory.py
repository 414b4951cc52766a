# SPDX-License-Identifier: Apache-2.0
"""Servers of the comparison beyond GPU memory: as much memory each, and configs that resolve."""

import json

import scripts  # noqa: F401  # makes the load tests importable

import capacity_beyond_memory as beyond  # isort: skip
from scenarios import Scenario  # isort: skip
from sglang_sparse.config import load_preset, resolve


def test_each_server_has_as_much_memory_for_kv() -> None:
    frames, host = 16 << 30, 80 * 10**9
    flags_of = beyond.configurations(frames, host)
    room = frames + host // 16
    for label, bytes_a_token in (("dense", 131072), ("page_minmax", 131072 * 17 / 16)):
        flags = flags_of[label]
        tokens = int(flags[flags.index("--max-total-tokens") + 1])
        assert 0 <= room - tokens * bytes_a_token < beyond.PAGE * bytes_a_token
        assert flags[flags.index("--hicache-size") + 1] == "80"
    model = load_preset("llama-3.1-8b", "page_minmax").model
    for label in ("page_minmax", "page_minmax_on_host"):
        flags = flags_of[label]
        config = resolve("page_minmax", flags[flags.index("--sparse-config") + 1], model)
        assert (config.page_size, config.min_sparse_tokens) == (16, 2048)
    placement = json.loads(flags[flags.index("--sparse-config") + 1])["placement"]
    assert placement == {"kind": "host", "device_bytes": frames, "host_bytes": host}


def test_the_documents_fit_host_memory_and_exceed_the_devices() -> None:
    scenario = Scenario.load(beyond.SCENARIO)
    longest = scenario.document[1] + scenario.question[1] + scenario.output[1]
    kv = scenario.documents * scenario.document[0] * beyond.TOKEN_BYTES
    assert kv > 3 * (16 << 30)
    # And what all requests that run at once add to them.
    more = beyond.RUNNING * (longest - scenario.document[1]) * beyond.TOKEN_BYTES
    assert kv + more < 80 * 10**9
