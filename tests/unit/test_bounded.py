# SPDX-License-Identifier: Apache-2.0
"""A server that holds a bounded number of tokens starts on tested versions of SGLang alone."""

from argparse import Namespace

import pytest

from sglang_sparse import compat
from sglang_sparse.bounded import check_bounded
from sglang_sparse.config import ConfigError, load_preset
from sglang_sparse.config.load import resolve_with_source


def flags() -> Namespace:
    return Namespace(disable_radix_cache=True, tp_size=1, kv_cache_dtype="auto")


@pytest.mark.parametrize("number", [*compat.TESTED_SGLANG, "0.5.20"])
def test_states_are_kept_on_tested_versions(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setattr(compat, "version", lambda name: number)
    bounded = resolve_with_source("cascade", None, load_preset("reference", "cascade").model)
    check_bounded(flags(), resolve_with_source("sparcas", None, bounded.config.model))
    if number in compat.TESTED_SGLANG:
        check_bounded(flags(), bounded)
        return
    with pytest.raises(ConfigError, match=r"not tested on sglang 0.5.20; allowed: sglang 0.5.17"):
        check_bounded(flags(), bounded)


@pytest.mark.parametrize("number", compat.TESTED_SGLANG)
def test_states_of_prefixes_are_kept_where_there_is_a_cache_for_them(
    monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    monkeypatch.setattr(compat, "version", lambda name: number)
    compat.current.cache_clear()
    try:
        change = '{"retention": {"snapshots": 3}}'
        bounded = resolve_with_source("cascade", change, load_preset("reference", "cascade").model)
        args = flags()
        args.disable_radix_cache = False
        if number == "0.5.17":
            check_bounded(args, bounded)
            return
        with pytest.raises(ConfigError, match=r"snapshots=3: sglang 0.5.23 has no cache to share"):
            check_bounded(args, bounded)
    finally:
        compat.current.cache_clear()
