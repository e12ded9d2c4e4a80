"""The table of named benchmark cases, and what they are to reach against torch's own attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Direction = Literal["forward", "backward"]

BOTH: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """Sizes and features of one benchmark; `goals` holds the wanted speed over torch by (dtype name, direction).

    `options` are keyword arguments of `attention`; bias and mask say that such a tensor of one batch and head exists,
    alibi and sinks that there is a number per head.
    """

    name: str
    batch: int
    heads: int
    len_q: int
    len_k: int
    dim: int
    kv_heads: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    bias: bool = False
    mask: bool = False
    alibi: bool = False
    sinks: bool = False
    dim_v: int = 0
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    directions: tuple[Direction, ...] = BOTH
    goals: Mapping[tuple[str, Direction], float] = field(default_factory=dict)

    def tensors(self, dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
        """q, k, v, dout, and what the case's features need, of normal numbers."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        kv_heads, dim_v = self.kv_heads or self.heads, self.dim_v or self.dim
        made = {
            "q": normal(self.batch, self.heads, self.len_q, self.dim),
            "k": normal(self.batch, kv_heads, self.len_k, self.dim),
            "v": normal(self.batch, kv_heads, self.len_k, dim_v),
            "dout": normal(self.batch, self.heads, self.len_q, dim_v),
        }
        if self.bias:
            made["bias"] = normal(1, 1, self.len_q, self.len_k)
        if self.mask:
            scores = (1, 1, self.len_q, self.len_k)
            made["mask"] = torch.rand(scores, generator=generator, device=device) > 0.2
        if self.alibi:
            made["alibi_slopes"] = torch.logspace(-1, -8, self.heads, base=2, device=device)
        if self.sinks:
            made["sinks"] = torch.randn(self.heads, generator=generator, device=device)
        return made

    @property
    def pairs(self) -> int:
        """Query-key pairs that are visible: what floating point operations are counted by."""
        left, right = self.options.get("window") or (None, None)
        if self.options.get("causal"):
            right = 0
        if left is None and right is None:
            return self.batch * self.heads * self.len_q * self.len_k
        shift = self.len_k - self.len_q
        total = 0
        for row in range(self.len_q):
            first = 0 if left is None else max(0, row + shift - left)
            last = self.len_k - 1 if right is None else min(self.len_k - 1, row + shift + right)
            total += max(0, last - first + 1)
        return self.batch * self.heads * total

    def flops(self, direction: Direction) -> float:
        """2 * pairs * (D + Dv) forward, 2.5 times that backward."""
        return 2.0 * self.pairs * (self.dim + (self.dim_v or self.dim)) * (1.0 if direction == "forward" else 2.5)


def _goals(forward: Mapping[str, float], backward: Mapping[str, float]) -> dict[tuple[str, Direction], float]:
    return {(dtype, "forward"): goal for dtype, goal in forward.items()} | {
        (dtype, "backward"): goal for dtype, goal in backward.items()
    }


_LONG = _goals({"fp32": 1.2, "bf16": 2.0, "fp16": 1.6}, {"fp32": 1.15, "bf16": 1.6, "fp16": 10.0})
_SHORT = _goals({"fp32": 1.3, "bf16": 2.2}, {"fp32": 1.3, "bf16": 2.0})
_ONE_HEAD = _goals({"fp32": 1.5}, {"fp32": 2.0})
_FEATURE = _goals({"fp32": 1.2, "bf16": 1.2}, {"fp32": 1.2, "bf16": 1.2})
_FEW = _goals({"fp32": 1.0, "bf16": 1.0}, {})
_TWO: tuple[str, ...] = ("fp32", "bf16")
_CAUSAL = {"causal": True}
_FORWARD: tuple[Direction, ...] = ("forward",)

CPU_CASES = (
    Case("long-d64", 1, 8, 4096, 4096, 64, goals=_LONG),
    Case("long-d64-causal", 1, 8, 4096, 4096, 64, options=_CAUSAL, goals=_LONG),
    Case("long-d128", 1, 4, 4096, 4096, 128, goals=_LONG),
    Case("long-d128-causal", 1, 4, 4096, 4096, 128, options=_CAUSAL, goals=_LONG),
    Case("short-128", 32, 12, 128, 128, 64, dtypes=_TWO, goals=_SHORT),
    Case("short-512", 8, 12, 512, 512, 64, dtypes=_TWO, goals=_SHORT),
    Case("one-head", 1, 1, 8192, 8192, 64, dtypes=_TWO, goals=_ONE_HEAD),
    Case("bias", 1, 8, 2048, 2048, 64, bias=True, dtypes=_TWO, goals=_FEATURE),
    Case("mask", 1, 8, 2048, 2048, 64, mask=True, dtypes=_TWO, goals=_FEATURE),
    Case("window-256", 1, 8, 4096, 4096, 64, options={"window": (256, 256)}, dtypes=_TWO, goals=_FEATURE),
    Case("softcap", 1, 8, 2048, 2048, 64, options={"softcap": 20.0}, dtypes=_TWO, goals=_FEATURE),
    Case("gqa-8-2", 1, 8, 4096, 4096, 64, kv_heads=2, dtypes=_TWO, goals=_FEATURE),
    *(Case(f"queries-{n}", 1, 8, n, 4096, 64, dtypes=_TWO, directions=_FORWARD, goals=_FEW) for n in (1, 2, 4, 8, 16)),
    Case("tiny", 1, 1, 16, 16, 64, dtypes=("fp32",), directions=_FORWARD, goals=_goals({"fp32": 1.0}, {})),
)
"""What `ioattn bench cpu` runs, in the order of its table."""


def _long(dim: int, length: int, dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Full and causal attention over 16,384 tokens, with H * D = 2048."""
    for suffix, options in (("", {}), ("-causal", _CAUSAL)):
        name = f"d{dim}-n{length}{suffix}"
        yield Case(name, 16_384 // length, 2048 // dim, length, length, dim, options=options, dtypes=dtypes)


_HALF: tuple[str, ...] = ("bf16",)
_SINGLE: tuple[str, ...] = ("fp32",)

GPU_CASES = (
    *(case for dim in (64, 128, 256) for length in (2048, 8192) for case in _long(dim, length, _HALF)),
    *(case for dim in (64, 128) for case in _long(dim, 4096, _TWO)),
)
"""What `ioattn bench gpu` runs first, in the order of its table."""


_OPTIONS: tuple[str, ...] = ("causal", "window", "softcap")


def _feature(name: str, kv_heads: int = 0, dim_v: int = 0, **given: Any) -> Case:
    options: dict[str, Any] = {key: given.pop(key) for key in _OPTIONS if key in given}
    return Case(name, 4, 16, 4096, 4096, 128, kv_heads, options, dim_v=dim_v, dtypes=_HALF, **given)


GPU_FEATURES = (
    _feature("plain"),
    _feature("causal", causal=True),
    _feature("window", window=(512, 512)),
    _feature("softcap", softcap=20.0),
    _feature("alibi", alibi=True),
    _feature("bias", bias=True),
    _feature("mask", mask=True),
    _feature("sinks", sinks=True),
    _feature("grouped", kv_heads=4),
    _feature("narrow-values", dim_v=64),
)
"""One feature each, whose rates stand against that of the first."""
