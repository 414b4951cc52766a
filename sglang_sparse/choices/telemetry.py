# SPDX-License-Identifier: Apache-2.0
"""Counters that kernels add to on the device, and that the host reads on request."""

from collections.abc import Sequence

import torch


class LayerCounters:
    """Sums per layer, kept on the device: no step waits for them.

    Kernels add to :attr:`tensor`. Its address never changes, so captured graphs can add to it too.
    The host reads it at SGLang's logging interval and for ``/server_info``, but not in every step.

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
        on_gpu = self.tensor.is_cuda
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._asked = False
        self._latest: dict[int, dict[str, int]] | None = None

    def row(self, layer: int) -> torch.Tensor:
        """int64 [names], the view that the kernels of ``layer`` add to."""
        return self.tensor[self.layers.index(layer)]

    def read(self) -> dict[int, dict[str, int]]:
        """The sums by layer and name. One copy to the host: it waits for the device."""
        return self._named(self.tensor)

    def poll(self) -> dict[int, dict[str, int]] | None:
        """The last sums that reached the host, or None; also starts to copy newer sums.

        This never waits. What a kernel adds during the copy may only show in the next sums.
        """
        done = self._asked and (self._copied is None or self._copied.query())
        if done:
            self._latest = self._named(self._host)
        if done or not self._asked:
            self._host.copy_(self.tensor, non_blocking=True)
            if self._copied is not None:
                self._copied.record()
            self._asked = True
        return self._latest

    def _named(self, sums: torch.Tensor) -> dict[int, dict[str, int]]:
        rows = sums.tolist()
        return {
            layer: dict(zip(self.names, row, strict=True))
            for layer, row in zip(self.layers, rows, strict=True)
        }
