# SPDX-License-Identifier: Apache-2.0
"""Counters on the device are read by layer and name."""

import pytest
import torch

from sglang_sparse.choices.telemetry import LayerCounters


def test_what_kernels_add_to_a_layers_row_is_read_under_its_name() -> None:
    counters = LayerCounters(("blocks", "cap_hits"), (1, 4), "cpu")
    address = counters.tensor.data_ptr()
    counters.row(4).add_(torch.tensor([7, 1]))
    counters.row(4).add_(torch.tensor([2**40, 0]))
    assert counters.read() == {
        1: {"blocks": 0, "cap_hits": 0},
        4: {"blocks": 2**40 + 7, "cap_hits": 1},
    }
    assert counters.tensor.data_ptr() == address


def test_polling_gives_what_the_poll_before_asked_for() -> None:
    counters = LayerCounters(("blocks",), (3,), "cpu")
    counters.row(3).add_(2)
    assert counters.poll() is None
    counters.row(3).add_(5)
    assert counters.poll() == {3: {"blocks": 2}}
    assert counters.poll() == {3: {"blocks": 7}}
    assert counters.read() == {3: {"blocks": 7}}


def test_names_and_layers_are_distinct() -> None:
    with pytest.raises(ValueError, match="must be distinct"):
        LayerCounters(("blocks", "blocks"), (1,), "cpu")
    with pytest.raises(ValueError, match="must be distinct"):
        LayerCounters(("blocks",), (1, 1), "cpu")
