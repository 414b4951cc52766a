# SPDX-License-Identifier: Apache-2.0
"""Perplexity of decoding: the server is made to decode a given text, token by token.

SGLang's input log-probabilities come from the prefill, which attends densely, so they cannot tell
budgets apart. Instead a custom logit processor (`--enable-custom-logit-processor`) forces the next
token of the text. It leaves two logits, of which the forced token's is the larger. They are chosen
such that SGLang then reports the token's true log-probability, divided by `SCALE`.
"""

import math
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_sparse import compat

SCALE = 256.0
# The forced token keeps a probability of at least 2 / 3. So log-probabilities reach down to -103.
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
            # The dict belongs to the request, so it can hold the request's step. SGLang samples
            # after each chunk of a prompt and throws all but the last sample away.
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
    """Whether SGLang now samples for a ``Req`` after a chunk that does not end its prompt."""
    return request is not None and compat.current().prefilled(request) < len(
        request.origin_input_ids
    )


def serialized() -> str:
    """What `custom_logit_processor` of a request holds; the server imports the class itself."""
    return str(ForcedTokens.to_str())
