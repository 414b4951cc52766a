# SPDX-License-Identifier: Apache-2.0
"""SGLang's HTTP application, for one of several tokenizer processes.

SGLang starts these processes by the name of its application, and loads no plugins in them. They
get this name instead (:mod:`sglang_sparse.tokenizers`), so requests are checked in each of them.
"""

from sglang.srt.plugins import load_plugins

load_plugins()

# The hooks must be in place before SGLang builds its application.
from sglang.srt.entrypoints.http_server import app  # noqa: E402

__all__ = ["app"]
