"""What one call of attention is: a frozen, hashable description, and every check of a user's arguments.

Symbols used everywhere: B batch, H query heads, Hk key/value heads, Nq queries, Nk keys, D head dimension of queries
and keys, Dv head dimension of values. Packed (varlen) inputs hold T rows of all sequences one after another.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ioattn.masks import EVERYTHING, Band
from ioattn.scores import ALIBI, BIAS, SOFTCAP, Term

Align = Literal["bottom-right", "top-left"]

Precision = Literal["tf32"]
"""What float32 products may be rounded to."""

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


class Tensors(NamedTuple):
    """The inputs of one call.

    Dense: q `(B, H, Nq, D)`, k `(B, Hk, Nk, D)`, v `(B, Hk, Nk, Dv)`; bias and mask are 4-D, each of the first three
    dimensions full or 1, the last Nk. Packed: q `(Tq, H, D)`, k `(Tk, Hk, D)`, v `(Tk, Hk, Dv)`, and int32 offsets
    `(B + 1,)`. alibi_slopes and sinks are `(H,)`. Strides are free.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, **extras: Tensor | None) -> Tensors:
        """The inputs with bias and mask seen as 4-D; raises TypeError for what is no tensor."""
        if not (is_strided(q) and is_strided(k) and is_strided(v)):
            for name, x in (("q", q), ("k", k), ("v", v)):
                check_tensor(name, x, "a torch.Tensor")
        given = {name: extra for name, extra in extras.items() if extra is not None}
        if not given:
            return cls._make((q, k, v, *_NO_EXTRAS))
        for name, extra in given.items():
            check_tensor(name, extra, "a torch.Tensor or None")
            if name in ("bias", "mask"):
                if not 1 <= extra.dim() <= 4:
                    raise ValueError(f"{name} has {extra.dim()} dimensions; it must broadcast to (B, H, Nq, Nk)")
                given[name] = extra[(None,) * (4 - extra.dim())]
        return cls(q, k, v, **given)


_NO_EXTRAS = (None,) * (len(Tensors._fields) - 3)


class Gradients(NamedTuple):
    """Where a backward writes; dbias and dsinks are None when nobody asked for them."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


class Options(NamedTuple):
    """The settings of one call that are not tensors, in the order of the registered operators' arguments."""

    lo: int | None = None
    hi: int | None = None
    shift: int = 0
    align: Align = "bottom-right"
    scale: float | None = None
    softcap: float | None = None
    deterministic: bool = False
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    precision: Precision | None = None

    def at(self, precision: Precision | None) -> Options:
        """The same options, with products that may be rounded; raises ValueError for what is no precision."""
        if precision is None:
            return self
        if precision != "tf32":
            raise ValueError(f"precision is {precision!r}; it must be 'tf32', or None for float32's own")
        return self._replace(precision=precision)

    @classmethod
    def of(
        cls,
        causal: bool | Align,
        window: tuple[int | None, int | None] | None,
        scale: float | None,
        softcap: float | None,
        deterministic: bool,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> Options:
        """The options behind the public arguments; raises ValueError or TypeError for what they cannot be."""
        if window is None and max_seqlen_q is None and max_seqlen_k is None and not torch.compiler.is_compiling():
            try:
                return _usual_options(causal, scale, softcap, deterministic)
            except TypeError:
                pass  # of a wrong type or without a hash; below it is said which
        return cls._checked(causal, window, scale, softcap, deterministic, max_seqlen_q, max_seqlen_k)

    @classmethod
    def _checked(
        cls,
        causal: bool | Align,
        window: tuple[int | None, int | None] | None,
        scale: float | None,
        softcap: float | None,
        deterministic: bool,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
    ) -> Options:
        align: Align = "bottom-right"
        if isinstance(causal, str):
            if causal not in ("bottom-right", "top-left"):
                raise ValueError(f"causal is {causal!r}; it must be True, False, 'bottom-right' or 'top-left'")
            align, causal = causal, True
        elif not isinstance(causal, bool):
            raise TypeError(f"causal is {causal!r}; it must be True, False, 'bottom-right' or 'top-left'")
        if window is not None:
            _check_window(window)
        if not isinstance(deterministic, bool):
            raise TypeError(f"deterministic is {deterministic!r}; it must be True or False")
        _check_number("scale", scale, positive=False)
        _check_number("softcap", softcap, positive=True)
        for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if length is None:
                continue
            if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt)):
                raise TypeError(f"{name} is {length!r}; it must be an int or None")
            # A compiler may know the length only as `.item()` of a tensor, of which it cannot ask this.
            if not torch.compiler.is_compiling() and not 0 <= length < 2**31:
                raise ValueError(f"{name} is {length}; it must be at least 0 and less than 2**31")
        band = Band.of(causal, window)
        return cls(band.lo, band.hi, 0, align, scale, softcap, deterministic, max_seqlen_q, max_seqlen_k)


@lru_cache(maxsize=1024, typed=True)
def _usual_options(causal: bool | Align, scale: float | None, softcap: float | None, deterministic: bool) -> Options:
    """The checked options of a call without a window; looked up, they take 0.3 us instead of 2.3 (2-core AVX-512)."""
    return Options._checked(causal, None, scale, softcap, deterministic, None, None)


@dataclass(frozen=True)
class Cache:
    """How a decoding problem's keys lie: a cache that holds a length of its own for each sequence.

    `page` is None for one stretch of memory per sequence, else the keys of a page; `appended` keys lie behind the given
    lengths. `splits` is how many pieces the keys of a sequence are cut into, 0 for a backend's own choice. `tree` is
    the number of ancestor matrices, 1 or the batch size, or None. `checked`: lengths and pages are checked on the host.
    """

    page: int | None = None
    appended: int = 0
    splits: int = 0
    tree: int | None = None
    checked: bool = False

    def words(self) -> Iterator[str]:
        """What it adds to a problem's one-line form."""
        yield "cache" if self.page is None else f"cache(page {self.page})"
        yield from (f"{name}={x}" for name, x in vars(self).items() if x and name in ("splits", "appended"))
        if self.tree is not None:
            yield "tree"


@dataclass(frozen=True)
class Problem:
    """Everything about a call but the numbers in its tensors: what a backend chooses, tunes and compiles for.

    `str(problem)` is one line. `band` is in the frame of `align`; `band_of` gives the band of one sequence. For packed
    inputs `batch` counts sequences and `len_q`, `len_k` are the longest lengths. `bias` and `mask` hold the sizes of
    the first three dimensions, 1 where broadcast. `alignment` is the largest power of two, up to 16 bytes, that divides
    the start and every row of q, k and v; 0 where the last dimension is strided. With a `cache`, `len_k` is the longest
    sequence that fits.
    """

    batch: int
    heads: int
    kv_heads: int
    len_q: int
    len_k: int
    dim: int
    dim_v: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    band: Band = EVERYTHING
    align: Align = "bottom-right"
    softcap: float | None = None
    alibi: bool = False
    bias: tuple[int, int, int] | None = None
    mask: tuple[int, int, int] | None = None
    sinks: bool = False
    packed: bool = False
    deterministic: bool = False
    precision: Precision | None = None
    alignment: int = 16
    cache: Cache | None = None

    @classmethod
    def of(cls, tensors: Tensors, options: Options) -> Problem:
        """The problem of these inputs, checked; raises ValueError or TypeError naming the argument at fault."""
        check(tensors)
        q, k, v = tensors.q, tensors.k, tensors.v
        if options.precision is not None and q.dtype != torch.float32:
            raise ValueError(f"precision is {options.precision!r} and q is {q.dtype}; it must be None but for float32")
        packed = tensors.cu_seqlens_q is not None
        len_q, len_k = longest_lengths(tensors, options)
        return cls(
            batch=tensors.cu_seqlens_q.shape[0] - 1 if tensors.cu_seqlens_q is not None else q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            len_q=len_q,
            len_k=len_k,
            dim=q.shape[-1],
            dim_v=v.shape[-1],
            dtype=q.dtype,
            device=q.device,
            scale=q.shape[-1] ** -0.5 if options.scale is None else float(options.scale),
            # What a side cannot hide at these lengths, kernels need not test, nor can its number overflow there.
            band=Band(options.lo, options.hi, options.shift).within(len_q + len_k + abs(options.shift)),
            align=options.align,
            softcap=None if options.softcap is None else float(options.softcap),
            alibi=tensors.alibi_slopes is not None,
            bias=_broadcast_sizes(tensors.bias),
            mask=_broadcast_sizes(tensors.mask),
            sinks=tensors.sinks is not None,
            packed=packed,
            deterministic=options.deterministic,
            precision=options.precision,
            alignment=row_alignment(q, k, v),
        )

    @cached_property
    def group(self) -> int:
        """Query heads per key/value head: query head `h` reads key/value head `h // group`."""
        return self.heads // self.kv_heads

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """The score terms that apply, in order."""
        present = ((SOFTCAP, self.softcap is not None), (ALIBI, self.alibi), (BIAS, self.bias is not None))
        return tuple(term for term, applies in present if applies)

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """What scores, softmax, sums and the LSE are computed in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def band_of(self, len_q: int, len_k: int) -> Band:
        """The band of one sequence of these lengths, with its alignment resolved."""
        return self.band.shifted(len_k - len_q) if self.align == "bottom-right" else self.band

    def __str__(self) -> str:
        return " ".join(self._words())

    def _words(self) -> Iterator[str]:
        yield f"B{self.batch} H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")
        yield f"N{self.len_q}" + (f"x{self.len_k}" if self.len_k != self.len_q else "")
        yield f"D{self.dim}" + (f"/{self.dim_v}" if self.dim_v != self.dim else "")
        yield f"{DTYPES[self.dtype]} {self.device.type}"
        if self.packed:
            yield "packed"
        if self.band.bounded:
            yield "causal" if self.band == Band(hi=0) else f"band[{self.band.lo},{self.band.hi}]+{self.band.shift}"
            if self.align != "bottom-right":
                yield self.align
        if self.scale != self.dim**-0.5:
            yield f"scale={self.scale:g}"
        if self.softcap is not None:
            yield f"softcap={self.softcap:g}"
        for name, sizes in (("bias", self.bias), ("mask", self.mask)):
            if sizes is not None:
                yield f"{name}({','.join(map(str, sizes))},Nk)"
        flags = (("alibi", self.alibi), ("sinks", self.sinks), ("deterministic", self.deterministic))
        yield from (name for name, on in flags if on)
        if self.precision is not None:
            yield self.precision
        yield from () if self.cache is None else self.cache.words()


def check(tensors: Tensors) -> None:
    """Raise ValueError or TypeError, naming the argument, unless the inputs describe one attention problem.

    Looks at shapes, types and devices only, so it also runs on fake tensors while a program is compiled.
    """
    packed = tensors.cu_seqlens_q is not None or tensors.cu_seqlens_k is not None
    _check_qkv(tensors, ("T", "H", "D") if packed else ("B", "H", "N", "D"))
    q, k = tensors.q, tensors.k
    if packed:
        _check_offsets_form(tensors)
        for name, value in (("bias", tensors.bias), ("mask", tensors.mask)):
            if value is not None:
                raise ValueError(f"{name} is given with packed inputs; it must be None there")
    elif k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}; it must have q's, {q.shape[0]}")
    for name, value in (("alibi_slopes", tensors.alibi_slopes), ("sinks", tensors.sinks)):
        check_per_head(name, value, q)
    _check_per_score("bias", tensors.bias, tensors, (q.dtype, torch.float32))
    _check_per_score("mask", tensors.mask, tensors, (torch.bool,))


def check_offsets(tensors: Tensors, options: Options) -> None:
    """Raise ValueError unless packed offsets are offsets; on a GPU this waits for the device."""
    for side, offsets, rows, longest in (
        ("q", tensors.cu_seqlens_q, tensors.q.shape[0], options.max_seqlen_q),
        ("k", tensors.cu_seqlens_k, tensors.k.shape[0], options.max_seqlen_k),
    ):
        assert offsets is not None
        values = offsets.tolist()
        lengths = [b - a for a, b in itertools.pairwise(values)]
        if values[0] != 0:
            raise ValueError(f"cu_seqlens_{side}[0] is {values[0]}; offsets must start at 0")
        if min(lengths, default=0) < 0:
            at = next(i for i, length in enumerate(lengths) if length < 0)
            raise ValueError(f"cu_seqlens_{side} falls from {values[at]} to {values[at + 1]}; it must not decrease")
        if values[-1] > rows:
            raise ValueError(f"cu_seqlens_{side} ends at {values[-1]}; it must not pass the {rows} rows of {side}")
        if longest is not None and longest < max(lengths, default=0):
            raise ValueError(f"max_seqlen_{side} is {longest}; the longest sequence has {max(lengths)} rows")


def longest_lengths(tensors: Tensors, options: Options) -> tuple[int, int]:
    """The longest number of queries and of keys in one sequence."""
    if tensors.cu_seqlens_q is None or tensors.cu_seqlens_k is None:
        return tensors.q.shape[2], tensors.k.shape[2]
    return _longest(options.max_seqlen_q, tensors.cu_seqlens_q), _longest(options.max_seqlen_k, tensors.cu_seqlens_k)


def _longest(given: int | None, offsets: Tensor) -> int:
    if given is not None:
        return given
    return int(offsets.diff().max()) if offsets.shape[0] > 1 else 0


def is_strided(value: Any) -> bool:
    """Whether it is a plain tensor with strides."""
    return type(value) is Tensor and value.layout is torch.strided and not value.is_nested


def check_tensor(name: str, value: Any, kind: str) -> None:
    """Raise TypeError unless `value` is a strided tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be {kind}")
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise TypeError(f"{name} is a {layout} tensor; it must be a strided one (for sequences: attention_varlen)")


def _check_qkv(tensors: Tensors, layout: tuple[str, ...]) -> None:
    q, k, v = tensors.q, tensors.k, tensors.v
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != len(layout):
            raise ValueError(f"{name} has {x.dim()} dimensions; it must have {len(layout)}: ({', '.join(layout)})")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}; it must be float16, bfloat16, float32 or float64")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype}; it must have q's dtype, {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; it must be on q's device, {q.device}")
        if x.shape[1] == 0 or x.shape[-1] == 0:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have at least one head and one column")
    rows = layout.index("N" if "N" in layout else "T")
    if v.shape[:-1] != k.shape[:-1]:
        side = "heads" if v.shape[1] != k.shape[1] else "rows" if v.shape[rows] != k.shape[rows] else "batch size"
        raise ValueError(f"v has shape {tuple(v.shape)}; its {side} must be k's, whose shape is {tuple(k.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head dimension {k.shape[-1]}; it must have q's, {q.shape[-1]}")
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"q has {q.shape[1]} heads; it must have a multiple of the {k.shape[1]} heads of k and v")


def _check_offsets_form(tensors: Tensors) -> None:
    offsets_q, offsets_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    for name, offsets in (("cu_seqlens_q", offsets_q), ("cu_seqlens_k", offsets_k)):
        if offsets is None or offsets.dtype != torch.int32:
            raise TypeError(f"{name} is {getattr(offsets, 'dtype', None)}; it must be an int32 tensor")
        if offsets.dim() != 1 or offsets.shape[0] < 1:
            raise ValueError(f"{name} has shape {tuple(offsets.shape)}; it must be (B + 1,)")
        if offsets.device != tensors.q.device:
            raise ValueError(f"{name} is on {offsets.device}; it must be on q's device, {tensors.q.device}")
    if offsets_q is not None and offsets_k is not None and offsets_q.shape != offsets_k.shape:
        raise ValueError(
            f"cu_seqlens_k has {offsets_k.shape[0]} entries; it must have as many as cu_seqlens_q, {offsets_q.shape[0]}"
        )


def check_per_head(name: str, value: Tensor | None, q: Tensor) -> None:
    """Raise unless `value` is None or one number per head of q, on its device."""
    if value is None:
        return
    if not value.is_floating_point():
        raise TypeError(f"{name} is {value.dtype}; it must be a floating point tensor")
    if value.dim() != 1 or value.shape[0] != q.shape[1]:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be (H,) = ({q.shape[1]},)")
    if value.device != q.device:
        raise ValueError(f"{name} is on {value.device}; it must be on q's device, {q.device}")


def _check_per_score(name: str, value: Tensor | None, tensors: Tensors, dtypes: tuple[torch.dtype, ...]) -> None:
    if value is None:
        return
    q, k = tensors.q, tensors.k
    if value.dtype not in dtypes:
        allowed = " or ".join(dict.fromkeys(str(d).removeprefix("torch.") for d in dtypes))
        raise TypeError(f"{name} is {value.dtype}; it must be a tensor of {allowed}")
    if value.device != q.device:
        raise ValueError(f"{name} is on {value.device}; it must be on q's device, {q.device}")
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    fits = value.dim() == 4 and all(a in (1, b) for a, b in zip(value.shape[:3], full[:3], strict=True))
    if not fits or value.shape[3] != full[3]:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; it must broadcast to (B, H, Nq, Nk) = {full} and hold all Nk keys"
        )


def _check_number(name: str, value: Any, positive: bool) -> None:
    if value is None:
        return
    if isinstance(value, (bool, Tensor)) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a number or None")
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise ValueError(f"{name} is {value if isinstance(value, float) else 'too large'}; it must be finite")
    if positive and not value > 0:
        raise ValueError(f"{name} is {value}; it must be positive, or None for no {name}")


def _check_window(window: Any) -> None:
    form = "it must be (left, right), each an int >= 0 and < 2**63 or None for unbounded"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window is {window!r}; {form}")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"window is {window!r}; {form}")
        if side is not None and not 0 <= side < 2**63:
            raise ValueError(f"window is {window!r}; {form}")


def _broadcast_sizes(value: Tensor | None) -> tuple[int, int, int] | None:
    return None if value is None else (value.shape[0], value.shape[1], value.shape[2])


def row_alignment(q: Tensor, k: Tensor, v: Tensor) -> int:
    """The largest power of two, up to 16 bytes, that divides the start and every row; 0 if columns are strided."""
    bits = 16
    for x in (q, k, v):
        if x.stride(-1) != 1 and x.shape[-1] != 1:
            return 0
        bits |= x.data_ptr()
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            if size > 1:
                bits |= stride * x.element_size()
    return bits & -bits
