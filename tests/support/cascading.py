# SPDX-License-Identifier: Apache-2.0
"""What tests hold of a request: less than the preset, so that short prompts fill and evict it."""

import json
from typing import Any

SMALL: dict[str, Any] = {"levels": 4, "stride": 256, "reduce": "mean"}


def small(**keys: Any) -> list[str]:
    """Flags of a server that holds it, with some keys beside."""
    return ["--sparse-config", json.dumps({"retention": SMALL | keys})]
