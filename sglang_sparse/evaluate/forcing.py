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

SCALE = 64.0
# Twice as likely as everything else together, at the least: log-probabilities down to -25.9.
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
            params["step"] = step + 1  # the dict is the request's own and stays with it
            token = params["forced"][min(step, len(params["forced"]) - 1)]
            logprob = logits[row].float().log_softmax(-1)[token] / SCALE
            logprob = logprob.clamp(min=_LEAST, max=-1e-7)
            other = 0 if token else 1
            logits[row] = -math.inf
            logits[row, token] = logprob.to(logits.dtype)
            logits[row, other] = torch.log(-torch.expm1(logprob)).to(logits.dtype)
        return logits


def serialized() -> str:
    """What `custom_logit_processor` of a request holds; the server imports the class itself."""
    return str(ForcedTokens.to_str())
