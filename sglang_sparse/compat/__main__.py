# SPDX-License-Identifier: Apache-2.0
"""Print the signatures of the installed SGLang as they are recorded in ``signatures.json``."""

from __future__ import annotations

import json

from sglang_sparse import compat
from sglang_sparse.compat.signatures import installed

print(json.dumps(installed(compat.current()), indent=2))
