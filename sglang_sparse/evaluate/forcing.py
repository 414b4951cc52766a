# SPDX-License-Identifier: Apache-2.0
"""Perplexity of decoding: the text is decoded token by token, whatever the model would have said.

SGLang's input log-probabilities come from the prefill, which attends densely, so they cannot tell
budgets apart. A custom logit processor (`--enable-custom-logit-processor`) forces the text instead,
and reports what it cost: it replaces the logits by two, of which the forced token's is the larger,
such that the log-probability that SGLang then reports is the true one divided by `SCALE`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

SCALE = 256.0
# Twice as likely as everything else together, at the least: log-probabilities down to -103.
_LEAST = math.log(2 / 3)


class ForcedTokens(CustomLogitProcessor):
    """Forces `custom_params.forced`, one token a step."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """Replace `logits`, float [rows, vocabulary], in place; see the module."""
        assert custom_param_list is not None
        for row, params in enumerate(custom_param_list):
            step = params.get("step", 0)
            # The dict is the request's own and stays with it. A prompt that is prefilled in
            # chunks is sampled after each of them, and all but the last are thrown away.
            params["step"] = step + (not _is_in_prompt(params.get("__req__")))
            token = params["forced"][min(step, len(params["forced"]) - 1)]
            logprob = logits[row].float().log_softmax(-1)[token] / SCALE
            logprob = logprob.clamp(min=_LEAST, max=-1e-7)
            other = 0 if token else 1
            logits[row] = -math.inf
            logits[row, token] = logprob.to(logits.dtype)
            logits[row, other] = torch.log(-torch.expm1(logprob)).to(logits.dtype)
        return logits


def _is_in_prompt(request: Any) -> bool:
    """Whether what is sampled for SGLang's ``Req`` now follows a chunk inside its prompt."""
    extended = getattr(request, "extend_range", None)
    return extended is not None and extended.end < len(request.origin_input_ids)


def serialized() -> str:
    """What `custom_logit_processor` of a request holds; the server imports the class itself."""
    return str(ForcedTokens.to_str())
