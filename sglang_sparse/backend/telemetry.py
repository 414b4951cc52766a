# SPDX-License-Identifier: Apache-2.0
"""Counters that kernels add to on the device and the host reads when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class LayerCounters:
    """Sums per layer, kept on the device: no step waits for them.

    Kernels add to :attr:`tensor` (its address never changes, so captured graphs may). The host
    reads it at SGLang's logging interval or for ``/server_info``, never once a step.

    Attributes:
        names: what each column counts.
        layers: global id of each row's layer.
        tensor: int64 [layers, names], contiguous. Sums since the start of the server.
    """

    def __init__(
        self, names: Sequence[str], layers: Sequence[int], device: torch.device | str
    ) -> None:
        """All zeros; ValueError if a name or a layer comes twice."""
        if len(set(names)) != len(names) or len(set(layers)) != len(layers):
            raise ValueError(f"names {list(names)} and layers {list(layers)} must be distinct")
        self.names = tuple(names)
        self.layers = tuple(layers)
        shape = (len(self.layers), len(self.names))
        self.tensor = torch.zeros(shape, dtype=torch.int64, device=device)

    def row(self, layer: int) -> torch.Tensor:
        """int64 [names], the view that the kernels of ``layer`` add to."""
        return self.tensor[self.layers.index(layer)]

    def read(self) -> dict[int, dict[str, int]]:
        """The sums by layer and name. One copy to the host: it waits for the device."""
        rows = self.tensor.tolist()
        return {
            layer: dict(zip(self.names, row, strict=True))
            for layer, row in zip(self.layers, rows, strict=True)
        }
