"""The named features and memory layouts that several topics run through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracle import Case
from torch import Tensor

# For batch 2, 4 heads, 50 queries and 81 keys.
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal top-left": {"causal": "top-left"},
    "window": {"window": (20, 7)},
    "window to the left": {"window": (5, None)},
    "window to the right": {"window": (None, 3)},
    "window of one key": {"window": (0, 0)},
    "causal window": {"causal": True, "window": (17, 9)},
    "causal top-left window": {"causal": "top-left", "window": (17, 9)},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi": True},
    "bias": {"bias": (2, 4, 50, 81)},
    "bias of one row": {"bias": (81,)},
    "bias per batch": {"bias": (2, 1, 1, 81)},
    "bias per head": {"bias": (4, 50, 81), "causal": True},
    "mask": {"mask": (2, 4, 50, 81)},
    "mask of padding": {"mask": (2, 1, 1, 81)},
    "mask and band": {"mask": (50, 81), "window": (30, 10)},
    "sinks": {"sinks": True},
    "sinks and window": {"sinks": True, "window": (3, 0)},
    "deterministic": {"deterministic": True, "causal": True},
    "everything": {
        "causal": True,
        "window": (40, 0),
        "scale": 0.5,
        "softcap": 2.0,
        "alibi": True,
        "bias": (1, 4, 50, 81),
        "mask": (2, 1, 50, 81),
        "sinks": True,
    },
}


def _transposed(x: Tensor, *order: int) -> Tensor:
    """The same values, stored in the given order of dimensions."""
    back = [order.index(dim) for dim in range(x.dim())]
    return x.permute(order).contiguous().permute(back)


def _row_padded(x: Tensor) -> Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 1), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., :-1] = x
    return wide[..., :-1]


def _offset(x: Tensor) -> Tensor:
    store = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
    store[1:] = x.flatten()
    return store[1:].view(x.shape)


def _sliced(x: Tensor) -> Tensor:
    longer = torch.full((*x.shape[:-2], x.shape[-2] + 13, x.shape[-1]), torch.nan, dtype=x.dtype, device=x.device)
    longer[..., 5:-8, :] = x
    return longer[..., 5:-8, :]


def _every_second(x: Tensor) -> Tensor:
    double = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype, device=x.device)
    double[..., ::2] = x
    return double[..., ::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "heads last": lambda x: _transposed(x, 0, 2, 1, 3),
    "queries outermost": lambda x: _transposed(x, 2, 0, 1, 3),
    "columns strided": lambda x: _transposed(x, 0, 1, 3, 2),
    "row padded": _row_padded,
    "offset by one": _offset,
    "slice of rows": _sliced,
    "every second column": _every_second,
    "one head expanded": lambda x: x[:, :1].expand(x.shape),
    "one batch expanded": lambda x: x[:1].expand(x.shape),
    "one row expanded": lambda x: x[:, :, :1].expand(x.shape),
    "one number expanded": lambda x: x[:1, :1, :1, :1].expand(x.shape),
}


def laid_out(case: Case, layout: str, names: str = "qkv") -> Case:
    """The case with q, k and v (or those of `names`) stored in another way."""
    return case.replace(**{name: LAYOUTS[layout](case.tensors[name]) for name in names})
