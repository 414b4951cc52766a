# SPDX-License-Identifier: Apache-2.0
"""Layers `none`: no layer selects; each attends to everything that is held."""

from typing import ClassVar, Literal

from sglang_sparse.choices.interfaces import LayersChoice
from sglang_sparse.choices.role import Role


class NoLayers(LayersChoice):
    """No layer selects; for a retention that bounds what is held."""

    selects: ClassVar[bool] = False

    kind: Literal["none"] = "none"

    def role(self, layer_id: int) -> Role:
        return Role(selects=False, source=None)
