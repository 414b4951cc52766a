# SPDX-License-Identifier: Apache-2.0
"""SGLang's n-gram worker, drafting chains.

Seam: ``speculative/ngram_worker.py: NGRAMWorker._prepare_draft_tokens``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.speculative.ngram_worker import NGRAMWorker

from sglang_sparse.speculation.chains import Ints, into_chains

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class ChainNGRAMWorker(NGRAMWorker):
    """Drafts the longest path of what the corpus finds."""

    def _prepare_draft_tokens(self, batch: ScheduleBatch) -> tuple[Ints, Ints]:
        tokens, masks = super()._prepare_draft_tokens(batch)
        return into_chains(tokens, masks, self.draft_token_num)
