# SPDX-License-Identifier: Apache-2.0
"""FlashInfer gets a prompt's offsets on the host, and everything else as SGLang gives it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_sparse.backend.host_lengths import HostLengths, offsets

META = torch.zeros(4, dtype=torch.int32, device="meta")  # whoever reads it fails


class Wrapper:
    """Notes what it is to plan."""

    def __init__(self) -> None:
        self.planned: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def begin_forward(self, *args: Any, **kw: Any) -> None:
        self.planned.append((args, kw))


@pytest.fixture
def backend() -> Any:
    return flashinfer()


def flashinfer(kv: torch.dtype = torch.bfloat16, use_paged: bool = False) -> Any:
    return SimpleNamespace(
        prefill_wrapper_ragged=Wrapper(),
        prefill_wrappers_paged=[Wrapper()],
        indices_updater_prefill=SimpleNamespace(data_type=kv, q_data_type=torch.bfloat16),
        use_paged=use_paged,
    )


def batch(mode: ForwardMode, prefix: list[int], new: list[int]) -> Any:
    return SimpleNamespace(
        forward_mode=mode, extend_prefix_lens_cpu=prefix, extend_seq_lens_cpu=new
    )


def values(tensor: torch.Tensor) -> list[int]:
    assert tensor.device.type == "cpu"
    assert tensor.dtype == torch.int32
    return tensor.tolist()


def test_cached_and_new_tokens_are_planned_apart(backend: Any) -> None:
    ragged, (paged,) = backend.prefill_wrapper_ragged, backend.prefill_wrappers_paged
    lengths = HostLengths(backend, together=False)
    with lengths.of(batch(ForwardMode.EXTEND, [100, 0, 7], [3, 5, 11])):
        ragged.begin_forward(META, META, 8, head_dim=64)
        paged.begin_forward(META, META, "indices", META, 8, custom_mask=None)
    ((rows, keys, heads), kw) = ragged.planned[0]
    assert values(rows) == values(keys) == [0, 3, 8, 19]
    assert (heads, kw) == (8, {"head_dim": 64})
    ((rows, keys, indices, last, heads), kw) = paged.planned[0]
    assert (values(rows), values(keys)) == ([0, 3, 8, 19], [0, 100, 100, 107])
    assert values(last) == [1, 1, 1]
    assert (indices, heads, kw) == ("indices", 8, {"custom_mask": None})


def test_all_tokens_are_planned_together_where_nothing_was_apart(backend: Any) -> None:
    (paged,) = backend.prefill_wrappers_paged
    lengths = HostLengths(backend, together=False)
    apart = batch(ForwardMode.EXTEND, [1, 2, 3], [4, 5, 6])
    with lengths.of(apart):
        backend.prefill_wrapper_ragged.begin_forward(META, META)
        paged.begin_forward(META, META, None, META)
    with lengths.of(batch(ForwardMode.MIXED, [100, 0, 7], [3, 5, 11])):
        paged.begin_forward(META, META, None, META)
    assert values(paged.planned[1][0][1]) == [0, 103, 108, 126]


def test_what_is_no_prompt_is_planned_as_sglang_does_it(backend: Any) -> None:
    (paged,) = backend.prefill_wrappers_paged
    lengths = HostLengths(backend, together=False)
    with lengths.of(batch(ForwardMode.TARGET_VERIFY, [9, 9, 9], [1, 1, 1])):
        paged.begin_forward(META, META, None, META)
    with (
        pytest.raises(ValueError, match="planned"),
        lengths.of(batch(ForwardMode.EXTEND, [9, 9, 9], [1, 1, 1])),
    ):
        raise ValueError("not planned")
    paged.begin_forward(META, META, None, META)
    assert all(args[:2] == (META, META) and args[3] is META for args, _ in paged.planned)


def test_another_number_of_rows_is_refused(backend: Any) -> None:
    lengths = HostLengths(backend, together=False)
    with (
        pytest.raises(RuntimeError, match="plans 3 rows of a prompt, the host knows 2"),
        lengths.of(batch(ForwardMode.EXTEND, [1, 2], [3, 4])),
    ):
        backend.prefill_wrapper_ragged.begin_forward(META, META)


@pytest.mark.parametrize(
    ("prefix", "new", "together"),
    [
        ([100, 0], [300, 212], True),
        ([100, 0], [300, 213], False),  # longer than it takes to launch
        ([0, 0], [3, 5], False),  # nothing is cached: one kernel anyway
    ],
)
def test_short_chunks_behind_a_prefix_attend_in_one_piece(
    prefix: list[int], new: list[int], together: bool
) -> None:
    backend = flashinfer()
    lengths = HostLengths(backend, together=True)
    with lengths.of(batch(ForwardMode.EXTEND, prefix, new)):
        assert backend.use_paged is together
    assert backend.use_paged is False
    with lengths.of(batch(ForwardMode.TARGET_VERIFY, [9], [1])):
        assert backend.use_paged is False
    with (
        pytest.raises(ValueError, match="not planned"),
        lengths.of(batch(ForwardMode.EXTEND, [9], [1])),
    ):
        raise ValueError("not planned")
    assert backend.use_paged is False


@pytest.mark.parametrize(
    ("backend", "together", "paged"),
    [
        (flashinfer(), False, False),
        (flashinfer(kv=torch.float8_e4m3fn), True, False),
        (flashinfer(kv=torch.float8_e4m3fn, use_paged=True), False, True),
        (flashinfer(use_paged=True), True, True),
    ],
)
def test_chunks_attend_as_sglang_has_it_elsewhere(
    backend: Any, together: bool, paged: bool
) -> None:
    with HostLengths(backend, together=together).of(batch(ForwardMode.EXTEND, [9], [1])):
        assert backend.use_paged is paged
    assert backend.use_paged is paged


def test_offsets_of_nothing() -> None:
    assert values(offsets([])) == [0]
