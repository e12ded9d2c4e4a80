"""Problems without tensors: by size, by name or by their one-line form.

`CASES` is the one table of named problems. The laboratory, the benchmarks, the tests and the documents take theirs from
it; what a case is to reach, and in which dtypes it is timed, stands in `ioattn.bench.goals`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ioattn.masks import Band
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
    for name, value in (("kv_heads", kv_heads), ("len_k", len_k), ("dim_v", dim_v)):
        if value is not None and value < 0:
            raise ValueError(f"{name} is {value}; it must not be negative")
    batch, heads, len_q, dim = sizes
    k_sizes = (batch, heads if kv_heads is None else kv_heads, len_q if len_k is None else len_k, dim)
    v_sizes = (*k_sizes[:3], dim if dim_v is None else dim_v)
    try:
        q, k, v = (torch.empty(s, dtype=DTYPE_NAMES[dtype], device="meta") for s in (tuple(sizes), k_sizes, v_sizes))
    except (RuntimeError, OverflowError):
        raise ValueError(
            f"sizes are {tuple(sizes)}, {k_sizes}, {v_sizes}; a tensor must have fewer than 2**63 bytes"
        ) from None
    return Problem.of(Tensors.of(q, k, v), Options.of(causal, window, None, None, False))


def label(problem: Problem) -> str:
    """The problem's one-line form without a device: here it has none.

    >>> label(problem_of((1, 16, 8192, 128), "bf16", causal=True))
    'B1 H16 N8192 D128 bf16 causal'
    """
    return str(problem).replace(f" {problem.device.type}", "", 1)


_LINE = re.compile(
    r"B(\d+) H(\d+)(?:/(\d+))? N(\d+)(?:x(\d+))? D(\d+)(?:/(\d+))? (fp16|bf16|fp32|fp64) \w+"
    r"(?P<band> causal| band\[(?P<lo>-?\d+|None),(?P<hi>-?\d+|None)\]\+0)?(?P<align> top-left)?"
)


def from_line(line: str) -> Problem | None:
    """The problem whose one-line form is `line`, or None where it has more than sizes and a band.

    >>> str(from_line("B1 H16 N8192 D128 bf16 cuda causal"))
    'B1 H16 N8192 D128 bf16 meta causal'
    """
    found = _LINE.fullmatch(line.strip())
    if found is None:
        return None
    batch, heads, kv_heads, len_q, len_k, dim, dim_v = (None if x is None else int(x) for x in found.groups()[:7])
    sizes = (batch or 0, heads or 0, len_q or 0, dim or 0)
    try:
        problem = problem_of(sizes, found[8], kv_heads=kv_heads, len_k=len_k, dim_v=dim_v)
    except ValueError:
        return None  # no heads, say
    if found["band"] is None:
        return problem
    ends = (None, "0") if found["band"] == " causal" else (found["lo"], found["hi"])
    lo, hi = (None if end in (None, "None") else int(end) for end in ends)
    return dataclasses.replace(problem, band=Band(lo, hi), align="top-left" if found["align"] else "bottom-right")


def inputs_of(problem: Problem, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """q, k, v, dout, and what the problem's features need: normal numbers, four of five keys visible."""
    p, generator = problem, torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(p.dtype)

    made = {
        "q": normal(p.batch, p.heads, p.len_q, p.dim),
        "k": normal(p.batch, p.kv_heads, p.len_k, p.dim),
        "v": normal(p.batch, p.kv_heads, p.len_k, p.dim_v),
        "dout": normal(p.batch, p.heads, p.len_q, p.dim_v),
    }
    if p.bias is not None:
        made["bias"] = normal(*p.bias, p.len_k)
    if p.mask is not None:
        made["mask"] = torch.rand((*p.mask, p.len_k), generator=generator, device=device) > 0.2
    if p.alibi:
        made["alibi_slopes"] = torch.logspace(-1, -8, p.heads, base=2, device=device)
    if p.sinks:
        made["sinks"] = torch.randn(p.heads, generator=generator, device=device)
    return made


@dataclass(frozen=True)
class Case:
    """Sizes (B, H, Nq, D) and features of a named problem; `dtype` is the one it is asked about in unless another is.

    `options` are keyword arguments of `attention`; bias and mask say that such a tensor of one batch and head exists,
    alibi and sinks that there is a number per head.
    """

    sizes: tuple[int, int, int, int]
    dtype: str = "fp32"
    kv_heads: int | None = None
    len_k: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    bias: bool = False
    mask: bool = False
    alibi: bool = False
    sinks: bool = False
    dim_v: int | None = None

    def problem(self, dtype: str | None = None) -> Problem:
        """The problem, in `dtype` if one is given."""
        bands = {name: value for name, value in self.options.items() if name in ("causal", "window")}
        more: dict[str, Any] = {"kv_heads": self.kv_heads, "len_k": self.len_k, "dim_v": self.dim_v}
        plain = problem_of(self.sizes, dtype or self.dtype, **more, **bands)
        per_score = (1, 1, plain.len_q)
        return dataclasses.replace(
            plain,
            softcap=self.options.get("softcap"),
            bias=per_score if self.bias else None,
            mask=per_score if self.mask else None,
            alibi=self.alibi,
            sinks=self.sinks,
        )

    @property
    def band(self) -> Band:
        """The band at any length: `problem` leaves out a side that hides nothing at the case's own."""
        return Band.of(bool(self.options.get("causal")), self.options.get("window"))


_CAUSAL = {"causal": True}
_FULL_AND_CAUSAL: tuple[tuple[str, Mapping[str, Any]], ...] = (("", {}), ("-causal", _CAUSAL))
_WINDOW_1024 = {"causal": True, "window": (1024, 0)}


def _many_tokens() -> Iterator[tuple[str, Case]]:
    """Full and causal attention over 16,384 tokens with H * D = 2048: what published tables of GPU kernels show."""
    for dim in (64, 128, 256):
        for length in (512, 1024, 2048, 4096, 8192, 16384):
            sizes = (16_384 // length, 2048 // dim, length, dim)
            yield f"d{dim}-n{length}", Case(sizes, "bf16")
            yield f"d{dim}-n{length}-causal", Case(sizes, "bf16", options=_CAUSAL)


def _one_feature(**given: Any) -> Case:
    return Case((4, 16, 4096, 128), "bf16", **given)


CASES: Mapping[str, Case] = {
    "chapter": Case((1, 1, 4096, 64), "fp16"),
    "chapter-32-heads": Case((1, 32, 4096, 64), "fp16"),
    "gpt2-medium": Case((64, 16, 1024, 64), "fp16"),
    "train-8k": Case((1, 16, 8192, 128), "bf16", options=_CAUSAL),
    "prefill-32k": Case((1, 32, 32768, 128), "bf16", 8, options=_CAUSAL),
    "window-32k": Case((1, 32, 32768, 128), "bf16", 8, options={"causal": True, "window": (4095, 0)}),
    "decode-128k": Case((1, 32, 1, 128), "bf16", 8, 131072, _CAUSAL),
    "decode-batch": Case((64, 32, 1, 128), "bf16", 8, 4096, _CAUSAL),
    "long-d64": Case((1, 8, 4096, 64)),
    "long-d64-causal": Case((1, 8, 4096, 64), options=_CAUSAL),
    "long-d128": Case((1, 4, 4096, 128)),
    "long-d128-causal": Case((1, 4, 4096, 128), options=_CAUSAL),
    "short-128": Case((32, 12, 128, 64)),
    "short-512": Case((8, 12, 512, 64)),
    "one-head": Case((1, 1, 8192, 64)),
    "bias": Case((1, 8, 2048, 64), bias=True),
    "mask": Case((1, 8, 2048, 64), mask=True),
    "window-256": Case((1, 8, 4096, 64), options={"window": (256, 256)}),
    "softcap": Case((1, 8, 2048, 64), options={"softcap": 20.0}),
    "gqa-8-2": Case((1, 8, 4096, 64), kv_heads=2),
    **{f"queries-{n}": Case((1, 8, n, 64), len_k=4096) for n in (1, 2, 4, 8, 16)},
    "tiny": Case((1, 1, 16, 64)),
    **dict(_many_tokens()),
    **{
        f"grouped-{h}-8{s}": Case((2, h, 8192, 128), "bf16", 8, options=o)
        for h in (32, 64)
        for s, o in _FULL_AND_CAUSAL
    },
    **{f"window-1024-d{d}": Case((1, 2048 // d, 16384, d), "bf16", options=_WINDOW_1024) for d in (64, 128)},
    "with-nothing": _one_feature(),
    "with-causal": _one_feature(options=_CAUSAL),
    "with-window": _one_feature(options={"window": (512, 512)}),
    "with-softcap": _one_feature(options={"softcap": 20.0}),
    "with-alibi": _one_feature(alibi=True),
    "with-bias": _one_feature(bias=True),
    "with-mask": _one_feature(mask=True),
    "with-sinks": _one_feature(sinks=True),
    "with-groups": _one_feature(kv_heads=4),
    "with-narrow-values": _one_feature(dim_v=64),
}
"""By name."""
