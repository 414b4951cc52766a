# SPDX-License-Identifier: Apache-2.0
"""Layers `first_dense`: the first layers stay dense (SparCas, section 4)."""

from typing import Literal

from pydantic import Field

from sglang_sparse.choices.choice import InvalidConfig, ModelShape
from sglang_sparse.choices.interfaces import LayersChoice
from sglang_sparse.choices.role import Role


class FirstDense(LayersChoice):
    """The first `n` layers attend to everything, the others select (SparCas, section 4)."""

    kind: Literal["first_dense"] = "first_dense"
    n: int = Field(ge=1, description="How many layers, counted from the input, stay dense.")

    def role(self, layer_id: int) -> Role:
        if layer_id < self.n:
            return Role(selects=False, source=None)
        return Role(selects=True, source=layer_id)

    def check_model(self, model: ModelShape) -> None:
        if self.n >= model.num_hidden_layers:
            raise InvalidConfig(
                f"layers.n {self.n} leaves no sparse layer in {model.describe()}",
                allowed=f"layers.n 1 to {model.num_hidden_layers - 1}",
                remedy="lower layers.n, or serve with a dense attention backend",
            )
