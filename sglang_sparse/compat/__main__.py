# SPDX-License-Identifier: Apache-2.0
"""Record the signatures of the installed SGLang in ``signatures.json``."""

from __future__ import annotations

from sglang_sparse import compat
from sglang_sparse.compat import v0517, v0523
from sglang_sparse.compat.signatures import write

write(compat.current(), tuple(one for one in (v0517, v0523) if one is not compat.current()))
