# SPDX-License-Identifier: Apache-2.0
"""Tokenizer processes get another application, and nothing else is served in its place."""

from typing import Any

import pytest
import uvicorn

from sglang_sparse.compat import v0517


def test_processes_get_the_named_application_until_the_server_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[tuple[Any, dict[str, Any]]] = []

    def record(app: Any, **options: Any) -> None:
        served.append((app, options))

    monkeypatch.setattr(uvicorn, "run", record)
    with v0517.workers_application("ours:app"):
        uvicorn.run("sglang.srt.entrypoints.http_server:app", workers=2)
        with pytest.raises(RuntimeError, match="uvicorn was to serve other:app"):
            uvicorn.run("other:app")
    assert served == [("ours:app", {"workers": 2})]
    assert uvicorn.run is record
