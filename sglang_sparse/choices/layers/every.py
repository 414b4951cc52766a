# SPDX-License-Identifier: Apache-2.0
"""Layers `every`: each layer selects for itself."""

from typing import Literal

from sglang_sparse.choices.interfaces import LayersChoice
from sglang_sparse.choices.role import Role


class EveryLayer(LayersChoice):
    """Every layer selects for itself."""

    kind: Literal["every"] = "every"

    def role(self, layer_id: int) -> Role:
        return Role(selects=True, source=layer_id)
