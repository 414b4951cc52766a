# SPDX-License-Identifier: Apache-2.0
"""What a new version of SGLang changes has a name, and untested versions are told apart."""

import json
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from sglang_sparse import compat
from sglang_sparse.compat import protocol, signatures, v0517, v0523
from sglang_sparse.config import ConfigError

VERSIONS: list[protocol.SGLangVersion] = [v0517, v0523]
NAMES = sorted(signatures.recorded(compat.current()))


@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_sglang_has_the_recorded_signature(name: str) -> None:
    assert signatures.signature_of(name) == signatures.recorded(compat.current())[name]


@pytest.mark.parametrize("module", VERSIONS)
def test_every_hook_and_seam_is_recorded(module: protocol.SGLangVersion) -> None:
    targets = [hook.target for hook in module.HOOKS]
    assert signatures.recorded(module).keys() == {*targets, *module.SEAMS}
    assert not set(targets) & set(module.SEAMS)


def test_the_record_has_what_its_versions_have_and_each_signature_once() -> None:
    shapes = {one.__name__.rsplit(".", 1)[1]: signatures.recorded(one) for one in (v0517, v0523)}
    assert json.loads(signatures.RECORD.read_text()) == signatures.merged(shapes)


@pytest.mark.parametrize("module", VERSIONS)
def test_every_hook_names_a_function_of_ours(module: protocol.SGLangVersion) -> None:
    for hook in module.HOOKS:
        assert hook.function.startswith("sglang_sparse.")
        if compat.current() is module or ".compat." not in hook.function:
            assert callable(hook.load()), hook


@pytest.mark.parametrize("module", VERSIONS)
def test_the_log_reads_a_decode_step_before_the_metrics(module: protocol.SGLangVersion) -> None:
    functions = [hook.function for hook in module.HOOKS]
    log, metrics = (f"sglang_sparse.{name}:after_decode" for name in ("progress_log", "metrics"))
    assert functions.index(log) < functions.index(metrics)


def test_the_module_of_a_tested_version_is_its_own() -> None:
    found = version("sglang")
    assert found in compat.TESTED_SGLANG
    assert compat.is_tested()
    assert compat.current().__name__.endswith("v" + found.replace(".", ""))
    assert compat.untested_warning() is None


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):
    """The installed SGLang under another version's number."""

    def set_version(number: str) -> None:
        monkeypatch.setattr(compat, "version", lambda name: number)
        compat.current.cache_clear()

    yield set_version
    compat.current.cache_clear()


@pytest.mark.parametrize("number", ["0.5.18", "0.5.22.post1"])
def test_a_version_between_is_told_apart_by_its_files_and_warned_of_in_one_line(
    pretend, number: str
) -> None:
    real = compat.current()
    pretend(number)
    assert compat.is_supported()
    assert compat.current() is real
    line = compat.untested_warning()
    assert line == (
        f"sglang {number} is between the tested versions 0.5.17 and 0.5.23 and is not tested "
        "itself; its signatures fit"
    )


def test_the_warning_names_what_changed(pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.radix_cache import RadixCache

    pretend("0.5.20")
    monkeypatch.setattr(RadixCache, "reset", lambda self, keep: None)
    assert str(compat.untested_warning()).endswith(
        "its signatures differ in sglang.srt.mem_cache.radix_cache.RadixCache.reset"
    )


@pytest.mark.parametrize("number", ["0.5.16", "0.5.24", "0.6.0"])
def test_a_version_out_of_range_is_refused_by_name(pretend, number: str) -> None:
    pretend(number)
    assert not compat.is_supported()
    with pytest.raises(ConfigError, match=f"sglang {number} is out of .* 0.5.17 to 0.5.23"):
        compat.verify_hooks()


def test_the_core_of_the_tree_is_the_one_that_sglang_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "rust")
    assert compat.tree_core() == "rust"


def test_prefills_longer_than_asked_for_are_in_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config

    monkeypatch.setattr(compat.current(), "resolved", lambda server_args: server_args)
    flags = SimpleNamespace(cuda_graph_config=default_cuda_graph_config())
    flags.cuda_graph_config.decode.bs = decode = [1, 8192]
    flags.cuda_graph_config.prefill.bs = None
    compat.limit_prefill_graphs(flags, 4608)
    assert flags.cuda_graph_config.prefill.bs is None
    flags.cuda_graph_config.prefill.bs = [4, 4096, 4608, 5120, 8192]
    compat.limit_prefill_graphs(flags, 4608)
    assert flags.cuda_graph_config.prefill.bs == [4, 4096, 4608]
    assert flags.cuda_graph_config.decode.bs is decode
