"""The CPU backend as on CPUs with fewer instructions than this one, and its NaN rules in pairs of bfloat16."""

from __future__ import annotations

import pytest
import torch
from attend import Shape, Target, check, dense

from ioattn import ops
from ioattn.backends import cpu
from ioattn.backends.cpu import jit

pytestmark = pytest.mark.skipif(cpu.unusable() is not None, reason=str(cpu.unusable()))

CPU = Target("cpu", "cpu")

LEVELS = {
    "avx2": ("haswell", "+avx2,+fma,+f16c", 8),
    "avx512": ("skylake-avx512", "+avx512f,+avx512bw,+avx512dq,+avx512vl", 16),
}
"""CPU, features and lanes of instruction sets that newer CPUs of the same family run, too."""


@pytest.fixture(params=LEVELS)
def narrowed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> jit.Target:
    """The backend as on a CPU that has nothing newer."""
    processor, features, lanes = LEVELS[request.param]
    host = jit.host()
    if host is None or not host.triple.startswith("x86_64") or host.lanes < lanes:
        pytest.skip(f"{request.param} code needs a CPU that runs it")
    target = jit.Target.of(host.triple, processor, features)
    assert target is not None
    assert (target.lanes, target.dpbf16) == (lanes, False)
    monkeypatch.setattr(jit, "host", lambda: target)
    monkeypatch.setattr(ops, "_plans", {})
    return target


FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "terms": {"softcap": 4.0, "alibi": True, "bias": (1, 4, 67, 91), "mask": (2, 1, 67, 91), "sinks": True},
}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrower_code_is_right(narrowed: jit.Target, features: str, dtype: torch.dtype) -> None:
    shape = Shape(batch=2, heads=4, n_q=67, n_k=91, dim=40, dim_v=24, kv_heads=2)
    check(CPU, dense(CPU, shape, dtype, **FEATURES[features]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrower_code_for_few_queries_is_right(narrowed: jit.Target, dtype: torch.dtype) -> None:
    check(CPU, dense(CPU, Shape(heads=2, n_q=2, n_k=300, dim=64, kv_heads=1), dtype, causal=True))


@pytest.mark.parametrize("n_q", [1, 2, 31, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_keys_may_hold_anything(dtype: torch.dtype, n_q: int) -> None:
    """Odd numbers of keys and queries: half of a pair is hidden, or is not there."""
    case = dense(CPU, Shape(n_q=n_q, n_k=161, dim=64), dtype, causal="top-left")
    for name, value in (("k", torch.nan), ("v", torch.inf)):
        case.tensors[name][:, :, n_q:] = value
    check(CPU, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nan_reaches_who_sees_it_and_nobody_else(dtype: torch.dtype) -> None:
    case = dense(CPU, Shape(n_q=101, n_k=101, dim=64), dtype, window=(7, 0))
    for name in ("q", "k", "v"):
        case.tensors[name][:, :, 50] = torch.nan
    result = check(CPU, case)
    assert result["out"][:, :, 49].isfinite().all()
    assert result["out"][:, :, 50:58].isnan().all()
    assert result["out"][:, :, 58].isfinite().all()
