"""Rows that see only the first half of their last block of keys: the device's decision, run in Python."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from device_code import NUMBERS, Plain

pytest.importorskip("triton", minversion="3.6", reason="Triton is not installed")

from ioattn.backends.gluon.kernels import tiles

KEYS, ROWS = 128, 64


@pytest.mark.parametrize("len_q", [64, 500, 1024])
@pytest.mark.parametrize("len_k", [65, 500, 1024])
@pytest.mark.parametrize("hi", [-70, 0, 37])
@pytest.mark.parametrize("bottom_right", [True, False])
def test_no_row_sees_a_key_of_the_second_half(
    len_q: int, len_k: int, hi: int, bottom_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "gl", NUMBERS)
    band = Plain(tiles.Band, lo=0, hi=hi, shift=0, has_lo=False, has_hi=True, bottom_right=bottom_right)
    tile = SimpleNamespace(len_q=len_q, len_k=len_k)
    shift = len_k - len_q if bottom_right else 0
    for row in range(0, len_q, ROWS):
        last = min(row + ROWS, len_q) - 1 + shift + hi
        for block in range((len_k + KEYS - 1) // KEYS):
            second_half = range(block * KEYS + KEYS // 2, (block + 1) * KEYS)
            assert band.see_half(tile, row, ROWS, block, KEYS) == all(key > last for key in second_half)
