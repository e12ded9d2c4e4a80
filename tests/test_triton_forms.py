"""Forms of the Triton kernels that its table may choose and its interpreter does not by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attend import Shape, Target, check, dense, packed

pytest.importorskip("triton", reason="Triton is not installed")

from ioattn.backends.triton import config, launch
from ioattn.backends.triton.config import FP16X3, Tiles

FORMS = {
    "apart": Tiles(32, 64, 4, 1, apart=True),
    "halves": Tiles(32, 64, 4, 1, FP16X3),
    "halves apart": Tiles(64, 32, 4, 1, FP16X3, apart=True),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, backend: Target) -> Tiles:
    if not backend.interpreted:
        pytest.skip("in Triton's interpreter the tiles can be set")
    tiles = FORMS[request.param]
    monkeypatch.setattr(config, "INTERPRETER", tiles)
    monkeypatch.setattr(launch, "_memories", {})
    return tiles


FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window and softcap": {"window": (40, 20), "softcap": 2.0},
    "alibi": {"alibi": True, "causal": True},
    "bias, mask and sinks": {"bias": (1, 1, 1, 130), "mask": (70, 130), "sinks": True},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(backend: Target, form: Tiles, feature: str) -> None:
    check(backend, dense(backend, Shape(1, 4, 70, 130, 24, dim_v=40, kv_heads=2), **FEATURES[feature]))


def test_packed(backend: Target, form: Tiles) -> None:
    check(backend, packed(backend, [9, 70, 0, 17], [0, 90, 5, 70], causal=True, slack=5))


@pytest.mark.parametrize("factor", [1e-6, 1e6, 1e12])
def test_sizes_of_numbers(backend: Target, form: Tiles, factor: float) -> None:
    """Halves have 5 bits of exponent: what is scaled wrongly is infinite or zero."""
    case = dense(backend, Shape(1, 2, 70, 130, 16))
    case = case.replace(v=case.tensors["v"] * factor)
    check(backend, type(case)(case.tensors, case.dout * factor, None, case.options))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e5], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_does_not_fit_in_halves(backend: Target, form: Tiles, name: str, value: float) -> None:
    case = dense(backend, Shape(1, 2, 70, 130, 16), causal=True)
    case.tensors[name][0, 0, 60, 3] = value
    check(backend, case)
