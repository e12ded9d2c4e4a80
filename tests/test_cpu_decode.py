"""Decoding in the CPU backend: the orders in which it reads rows, and columns of BF16 taken apart and put together."""

from __future__ import annotations

import pytest
import torch
from attend import DTYPES, Target
from decoding import Sizes, build, check

import ioattn
from ioattn.backends import cpu

pytestmark = pytest.mark.skipif(cpu.unusable() is not None, reason=str(cpu.unusable()))

CPU = Target("cpu", "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 24, 40, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 5])
def test_columns_and_queries(group: int, dim: int, dtype: torch.dtype) -> None:
    """Pairs of vectors and a single one; queries that read side by side, in the order of memory, and both."""
    sizes = Sizes(lengths=(700, 63, 66, 515), heads=2 * group, dim=dim, capacity=704, dtype=dtype)
    check(CPU, build(CPU, sizes))


@pytest.mark.parametrize("window", [None, (333, 0)], ids=str)
@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 4])
def test_pages_side_by_side(group: int, page: int, window: tuple[int, int] | None) -> None:
    """Four whole pages at once, single ones, and parts of them at both ends of a block."""
    sizes = Sizes(lengths=(1024, 777, 4 * page, 1), heads=2 * group, dim=24, capacity=1024, page=page)
    check(CPU, build(CPU, sizes, window=window))


@pytest.mark.parametrize("page", [None, 16, 64], ids=str)
def test_a_masked_nan_in_the_last_page_stays_out(page: int | None) -> None:
    """The last of four pages that are read at once has a value that only the second query sees."""
    keys, table = 4 * (page or 64), None
    q, k, v = torch.randn(1, 1, 2, 16), torch.randn(1, 1, keys, 16), torch.randn(1, 1, keys, 16)
    if page is not None:
        k, v = (x.view(4, 1, page, 16) for x in (k, v))
        table = torch.arange(4, dtype=torch.int32)[None]

    def decoded() -> torch.Tensor:
        return ioattn.attention_decode(q, k, v, cache_seqlens=keys, block_table=table, backend="cpu")

    finite = decoded()
    v[-1, :, -1] = torch.nan
    result = decoded()
    assert torch.equal(result[:, :, 0], finite[:, :, 0])
    assert result[:, :, 1].isnan().all()
