# SPDX-License-Identifier: Apache-2.0
# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def"
"""Triton implementation of copies between pages in host memory and rows on the device."""

import torch
import triton
import triton.language as tl


@triton.jit
def copy_blocks_kernel(
    host, pages, k, v, H: tl.constexpr, WORDS: tl.constexpr, PAGE: tl.constexpr,
    BW: tl.constexpr, TO_HOST: tl.constexpr,
):  # fmt: skip
    # WORDS: 4-byte words of a head's key.
    i_n, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_block = tl.load(pages + i_n).to(tl.int64) * H + i_h
    o_p, o_w = tl.arange(0, PAGE)[:, None], tl.arange(0, BW)[None, :]
    p_host = host + i_block * (2 * PAGE * WORDS) + o_p * WORDS + o_w
    o_row = ((i_n * PAGE + o_p) * H + i_h) * WORDS + o_w
    m_w = o_w < WORDS
    if TO_HOST:
        tl.store(p_host, tl.load(k + o_row, mask=m_w), mask=m_w)
        tl.store(p_host + PAGE * WORDS, tl.load(v + o_row, mask=m_w), mask=m_w)
    else:
        tl.store(k + o_row, tl.load(p_host, mask=m_w), mask=m_w)
        tl.store(v + o_row, tl.load(p_host + PAGE * WORDS, mask=m_w), mask=m_w)


def copy_blocks_triton(
    host: torch.Tensor, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, to_host: bool
) -> None:
    """Launch :func:`copy_blocks_kernel`, one program a page and KV head."""
    blocks, k, v = (tensor.view(torch.int32) for tensor in (host, k, v))
    _, heads, _, page_size, words = blocks.shape
    copy_blocks_kernel[(pages.shape[0], heads)](
        blocks, pages, k, v, H=heads, WORDS=words, PAGE=page_size,
        BW=triton.next_power_of_2(words), TO_HOST=to_host,
    )  # fmt: skip
