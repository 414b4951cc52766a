# SPDX-License-Identifier: Apache-2.0
"""Each folder holds what is tested on one version of SGLang alone."""

from sglang_sparse import compat

installed = compat.current().__name__.rpartition(".")[2]
collect_ignore = [folder for folder in ("v0517", "v0523") if folder != installed]
