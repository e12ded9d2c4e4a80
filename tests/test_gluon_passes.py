"""The passes around the Hopper backward, and its repair of hidden NaN, in Triton's interpreter against `eager`.

They are plain Triton, so that this needs no GPU: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ioattn.backends import eager
from ioattn.compose import fold
from ioattn.problem import Gradients, Options, Problem, Tensors

triton = pytest.importorskip("triton", minversion="3.6", reason="Triton is not installed")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl  # noqa: E402

from ioattn.backends.gluon.backward_config import head_rows  # noqa: E402
from ioattn.backends.gluon.kernels import around, repair  # noqa: E402
from ioattn.backends.gluon.kernels.backward_call import register_order  # noqa: E402
from ioattn.backends.gluon.launch import strides_of  # noqa: E402

DIM = 64
LOG2E = 1.4426950408889634
Poison = Callable[[Tensors, Tensor], None]


class Case(NamedTuple):
    """Sizes as lengths of sequences (one: dense), features, and what is made NaN or infinite."""

    len_q: tuple[int, ...] = (70,)
    len_k: tuple[int, ...] = (65,)
    heads: int = 2
    kv_heads: int = 2
    slack: int = 0
    causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float | None = None
    alibi: bool = False
    poison: Poison | None = None


def hidden_keys(tensors: Tensors, dout: Tensor) -> None:
    tensors.q[0, 1, 5] = torch.nan
    tensors.k[0, 0, 60] = torch.inf
    dout[0, 1, 9, 2] = torch.nan


def rows_without_keys(tensors: Tensors, dout: Tensor) -> None:
    tensors.q[0, 0, 2] = torch.nan
    dout[0, 0, 3, 1] = torch.inf
    dout[0, 0, 40] = torch.nan


def slack_rows(tensors: Tensors, dout: Tensor) -> None:
    for x in (tensors.q, tensors.k, tensors.v, dout):
        x[-4:] = torch.nan


CASES = {
    "grouped causal": Case(heads=4, causal=True),
    "window softcap alibi": Case(window=(20, 7), softcap=1.5, alibi=True),
    "causal alibi": Case(causal=True, alibi=True),
    "hidden keys": Case(len_k=(70,), causal=True, poison=hidden_keys),
    "rows without keys": Case(len_k=(50,), causal=True, poison=rows_without_keys),
    "packed": Case((5, 0, 65), (30, 3, 57), heads=4, causal=True),
    "packed slack": Case((5, 0, 65), (30, 3, 57), slack=4, causal=True, poison=slack_rows),
}


def tanh(x):  # type: ignore[no-untyped-def]
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2 * LOG2E)))


class Run:
    """A case with its forward, the specification's gradients, and the workspace after `prepare`."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tensors = self.inputs()
        q, k, v = self.tensors[:3]
        options = Options.of(case.causal, case.window, None, case.softcap, False)
        self.problem = problem = Problem.of(self.tensors, options)
        rows = q.shape[0] if problem.packed else problem.len_q
        self.out = torch.empty_like(q)
        self.lse = torch.empty((problem.heads, rows) if problem.packed else q.shape[:-1])
        self.dout = torch.randn(q.shape).half()
        if case.poison is not None:
            case.poison(self.tensors, self.dout)
        eager.forward(problem, self.tensors, self.out, self.lse)
        self.truth = Gradients(*map(torch.empty_like, (q, k, v)))
        eager.backward(problem, self.tensors, self.out, self.lse, self.dout, None, self.truth)
        self.entries = 1 if problem.packed else problem.batch
        self.head_rows = head_rows(problem, rows)
        self.total = self.entries * problem.heads * self.head_rows
        self.sequences = 1 << problem.batch.bit_length() if problem.packed else 0
        self.flag = torch.zeros(1, dtype=torch.int32)
        self.lse_rows, self.delta_rows = torch.empty((2, self.total))
        self.dq_rows = torch.empty((self.total, DIM))
        self.dq_turns = torch.full((self.total // 64,), -1, dtype=torch.int32)
        self.sizes = (problem.batch, problem.heads, rows, self.head_rows)

    def inputs(self) -> Tensors:
        case = self.case
        slopes = 0.5 ** torch.arange(1, case.heads + 1) if case.alibi else None
        if len(case.len_q) == 1:
            shapes = [(1, case.heads, *case.len_q, 40), *[(1, case.kv_heads, *case.len_k, 40)] * 2]
            return Tensors.of(*(torch.randn(s).half() for s in shapes), alibi_slopes=slopes)
        rows_q, rows_k = sum(case.len_q) + case.slack, sum(case.len_k) + case.slack
        shapes = [(rows_q, case.heads, 40), *[(rows_k, case.kv_heads, 40)] * 2]
        offsets = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (case.len_q, case.len_k)]
        given = [torch.randn(s).half() for s in shapes]
        return Tensors.of(*given, alibi_slopes=slopes, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])

    def prepare(self, sinks: Tensor | None = None, terms: Tensor | None = None) -> None:
        lse_strides = (0, self.lse.stride(0)) if self.problem.packed else self.lse.stride()[:2]
        q = self.tensors.q
        around.prepare[(self.total // 64,)](
            *(self.out, strides_of(self.out), self.dout, strides_of(self.dout), self.lse, lse_strides),
            *(None, (0, 0, 0), self.lse_rows, self.delta_rows, self.dq_rows, self.dq_turns, None, sinks, terms),
            *(self.flag, q, strides_of(q), self.tensors.cu_seqlens_q),
            *((*self.sizes, self.problem.dim_v, self.problem.dim), 64, DIM, self.sequences),
        )

    def repair(self) -> Gradients:
        """Every gradient again, as all are NaN."""
        problem, tensors, band = self.problem, self.tensors, self.problem.band
        grads = Gradients(*(torch.full_like(x, torch.nan) for x in tensors[:3]))
        formula = fold(problem.terms, {"tanh": tanh}) if problem.terms else None
        steps: tuple[Any, Any] = (None, None) if formula is None else (formula.step, formula.dstep)
        form = (band.lo is not None, band.hi is not None, True, problem.softcap is not None)
        sizes = (problem.batch, problem.len_q, problem.len_k, problem.heads, problem.kv_heads, self.head_rows)
        inputs = [y for x in (*tensors[:3], self.dout) for y in (x, strides_of(x))]
        tail = (
            *(tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.alibi_slopes, problem.softcap or 0.0, problem.scale),
            *(sizes, (problem.dim, problem.dim_v), (band.lo or 0, band.hi or 0, band.shift)),
            *(*steps, 32, DIM, self.sequences, form),
        )
        given = (torch.ones_like(self.flag), *inputs, self.lse_rows, self.delta_rows)
        repair.repair_keys[(3,)](*given, grads.dk, strides_of(grads.dk), grads.dv, strides_of(grads.dv), *tail)
        repair.repair_queries[(3,)](*given, grads.dq, strides_of(grads.dq), *tail)
        return grads


@pytest.fixture(params=CASES)
def run(request: pytest.FixtureRequest) -> Run:
    return Run(CASES[request.param])


def test_the_flag_is_raised_for_what_may_leak(run: Run) -> None:
    run.prepare()
    assert run.flag.item() == (run.case.poison is not None)
    assert not run.dq_rows.any()
    assert not run.dq_turns.any()


def test_terms_of_sinks_lie_where_their_heads_do(run: Run) -> None:
    sinks = torch.randn(run.problem.heads)
    terms = torch.full((run.total // 64,), torch.nan)
    run.prepare(sinks, terms)
    delta = run.delta_rows.view(run.entries, run.problem.heads, -1)
    weights = torch.exp2(sinks[:, None] * LOG2E - run.lse_rows.view_as(delta))
    expected = torch.where(weights == 0, 0, -weights * delta).sum(-1)
    torch.testing.assert_close(terms.view(run.entries, run.problem.heads, -1).sum(-1), expected, equal_nan=True)


def hidden_values(tensors: Tensors, dout: Tensor) -> None:
    tensors.v[0, 1, 60, 3] = torch.nan
    tensors.v[0, 0, 68] = torch.inf


def test_hidden_values_are_repaired() -> None:
    """A hidden NaN of V reaches dS = 0 * (dP - delta), and dQ: its conversion raises the flag."""
    run = Run(Case(len_k=(70,), causal=True, poison=hidden_values))
    assert run.truth.dq[0, 1, :60].isfinite().all()
    assert run.truth.dq[0, 1, 60:].isnan().all()
    test_repaired_gradients_are_the_specifications(run)


def test_repaired_gradients_are_the_specifications(run: Run) -> None:
    run.prepare()
    grads = run.repair()
    for name, gradient, expected in zip("qkv", grads[:3], run.truth[:3], strict=True):
        used = sum(run.case.len_q if name == "q" else run.case.len_k) if run.problem.packed else None
        mine, truth = gradient[:used].float(), expected[:used].float()
        assert torch.equal(mine.isnan(), truth.isnan()), name
        assert torch.equal(mine.isinf(), truth.isinf()), name
        finite = truth.isfinite()
        # Both round to fp16 in several places, in different orders.
        assert (mine[finite] - truth[finite]).norm() <= 4 * torch.finfo(torch.float16).eps * truth[finite].norm(), name


def in_register_order(rows: Tensor, transposed: bool) -> Tensor:
    """The sums of dQ as the compute groups leave them in the order of `register_order`: at D 64 tiles of 128 queries,
    at D 128 halves of the columns of 64; or their transposes.
    """
    width = rows.shape[1]
    shape = (128, 64) if width == 64 else (64, 64)
    parts = rows.view(-1, shape[0], width // 64, 64).transpose(1, 2)
    if transposed:
        parts, shape = parts.transpose(2, 3), shape[::-1]
    bases = torch.tensor(register_order(*shape).offset_bases)
    bits = torch.arange(math.prod(shape))[:, None] >> torch.arange(len(bases)) & 1
    row, col = (bits @ bases).unbind(1)
    return parts[..., row, col].contiguous()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_dq_is_converted_where_its_sequence_lies(run: Run, width: int, transposed: bool) -> None:
    rows = torch.arange(run.total * width, dtype=torch.float32).view(run.total, width) / run.total
    dq = torch.full_like(run.tensors.q, torch.nan)
    offsets, (dim, scale) = run.tensors.cu_seqlens_q, (run.problem.dim, 0.5)
    around.convert[(run.total // 64,)](
        *(in_register_order(rows, transposed), dq, strides_of(dq), run.flag, offsets, (*run.sizes, dim), scale),
        *(64, width, run.sequences, transposed),
    )
    by_head = rows.view(run.entries, run.problem.heads, run.head_rows, width)[..., :dim] * scale
    starts = [0] if offsets is None else offsets.tolist()
    for b, length in enumerate(run.case.len_q):
        start = 0 if offsets is None else 128 * (b + -(-starts[b] // 128))
        part = by_head[0, :, start : start + length].half()
        mine = dq[0] if offsets is None else dq[starts[b] : starts[b + 1]].transpose(0, 1)
        assert torch.equal(mine, part)
