# SPDX-License-Identifier: Apache-2.0
"""Which of SGLang's functions are hooked."""

import sys

import pytest

from sglang_sparse import compat

# What it hooks follows from what SGLang can import.
pytestmark = pytest.mark.sglang
RESPONSES = "sglang.srt.entrypoints.openai.serving_responses"


def hooked() -> list[str]:
    """Targets of the hooks, with the endpoints looked up anew."""
    compat.serves_responses.cache_clear()
    try:
        return [h.target for h in compat._hooks() if h.target.startswith(RESPONSES)]
    finally:
        compat.serves_responses.cache_clear()


def test_an_endpoint_that_sglang_cannot_import_is_not_hooked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert hooked() == [f"{RESPONSES}.OpenAIServingResponses.create_responses"]
    monkeypatch.setitem(sys.modules, RESPONSES, None)
    assert hooked() == []
