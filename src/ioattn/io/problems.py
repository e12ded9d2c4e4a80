"""Problems by size or by name, without tensors: what the laboratory's commands are asked about."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from ioattn.problem import DTYPES, Align, Options, Problem, Tensors

DTYPE_NAMES = {name: dtype for dtype, name in DTYPES.items()}


def problem_of(
    sizes: Sequence[int],
    dtype: str = "fp16",
    *,
    kv_heads: int | None = None,
    len_k: int | None = None,
    dim_v: int | None = None,
    causal: bool | Align = False,
    window: tuple[int | None, int | None] | None = None,
) -> Problem:
    """The problem of these sizes.

    Args:
        sizes: B, H, Nq, D.
        dtype: "fp16", "bf16", "fp32" or "fp64".
        kv_heads: Hk, H unless given.
        len_k: Nk, Nq unless given.
        dim_v: Dv, D unless given.
        causal: as in `ioattn.attention`.
        window: as in `ioattn.attention`.

    Raises:
        ValueError, TypeError: naming what does not fit, as `ioattn.attention` does.

    Example:
        >>> str(problem_of((1, 16, 8192, 128), "bf16", causal=True))
        'B1 H16 N8192 D128 bf16 meta causal'
    """
    if len(sizes) != 4 or min(sizes) < 0:
        raise ValueError(f"sizes is {tuple(sizes)}; it must be (B, H, Nq, D)")
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPE_NAMES)}")
    batch, heads, len_q, dim = sizes
    k_sizes = (batch, heads if kv_heads is None else kv_heads, len_q if len_k is None else len_k, dim)
    v_sizes = (*k_sizes[:3], dim if dim_v is None else dim_v)
    q, k, v = (torch.empty(s, dtype=DTYPE_NAMES[dtype], device="meta") for s in (tuple(sizes), k_sizes, v_sizes))
    return Problem.of(Tensors.of(q, k, v), Options.of(causal, window, None, None, False))


def label(problem: Problem) -> str:
    """The problem's one-line form without a device: here it has none.

    >>> label(problem_of((1, 16, 8192, 128), "bf16", causal=True))
    'B1 H16 N8192 D128 bf16 causal'
    """
    return str(problem).replace(f" {problem.device.type}", "", 1)


NAMED = {
    "chapter": problem_of((1, 1, 4096, 64)),
    "chapter-32-heads": problem_of((1, 32, 4096, 64)),
    "gpt2-medium": problem_of((64, 16, 1024, 64)),
    "train-8k": problem_of((1, 16, 8192, 128), "bf16", causal=True),
    "prefill-32k": problem_of((1, 32, 32768, 128), "bf16", kv_heads=8, causal=True),
    "window-32k": problem_of((1, 32, 32768, 128), "bf16", kv_heads=8, causal=True, window=(4095, 0)),
    "decode-128k": problem_of((1, 32, 1, 128), "bf16", kv_heads=8, len_k=131072, causal=True),
    "decode-batch": problem_of((64, 32, 1, 128), "bf16", kv_heads=8, len_k=4096, causal=True),
}
"""Problems that the documentation speaks of."""

_LINE = re.compile(r"B(\d+) H(\d+)(?:/(\d+))? N(\d+)(?:x(\d+))? D(\d+)(?:/(\d+))? (fp16|bf16|fp32|fp64) \w+(.*)")


def from_line(line: str) -> Problem | None:
    """The problem whose one-line form is `line`, or None where the laboratory does not cover it.

    >>> str(from_line("B1 H16 N8192 D128 bf16 cuda causal"))
    'B1 H16 N8192 D128 bf16 meta causal'
    """
    found = _LINE.fullmatch(line.strip())
    if found is None or found[9].strip() not in ("", "causal"):
        return None
    batch, heads, kv_heads, len_q, len_k, dim, dim_v = (None if x is None else int(x) for x in found.groups()[:7])
    sizes = (batch or 0, heads or 0, len_q or 0, dim or 0)
    causal = found[9].strip() == "causal"
    return problem_of(sizes, found[8], kv_heads=kv_heads, len_k=len_k, dim_v=dim_v, causal=causal)
