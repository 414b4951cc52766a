# SPDX-License-Identifier: Apache-2.0
"""The optimiser of the reference model: Muon for the layers' matrices, AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch

from sglang_sparse.research.model import ReferenceModel

_DECAY = 0.02


class Optimizer:
    """PyTorch's Muon for the matrices of the layers, AdamW for embeddings and norms.

    Muon's updates are scaled to the size of AdamW's, so one learning rate does for both (Liu et
    al., "Muon is scalable for LLM training", section 2.2).
    """

    def __init__(self, model: ReferenceModel) -> None:
        """Neither has made a step; ``step`` is given the rate."""
        matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
        of_muon = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in of_muon]
        self.muon = torch.optim.Muon(
            matrices, weight_decay=_DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW(
            [
                {"params": [p for p in others if p.dim() == 2], "weight_decay": _DECAY},
                {"params": [p for p in others if p.dim() != 2], "weight_decay": 0.0},
            ],
            betas=(0.9, 0.98),
            eps=1e-8,
            fused=next(model.parameters()).is_cuda,
        )

    def step(self, rate: float) -> None:
        """Update all parameters by their gradients at a learning rate."""
        for optimizer in (self.muon, self.adamw):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The moments of both."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What ``state_dict`` gave."""
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
