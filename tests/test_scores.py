"""Score terms: each derivative against autograd, and the order in which they apply."""

from __future__ import annotations

import itertools

import pytest
import torch
from attend import Shape, Target, check, dense, run
from oracle import Case

from ioattn import compose, scores

OPERANDS = {"softcap": 1.7, "alibi": 0.25, "bias": -0.4}
SUBSETS = [
    terms for n in range(4) for terms in itertools.combinations(scores.ORDER, n)
]  # every set of terms, in the order that they apply in


@pytest.mark.parametrize("terms", SUBSETS, ids=lambda terms: "+".join(term.name for term in terms) or "none")
def test_dstep_of_folded_terms_is_the_derivative(terms: tuple[scores.Term, ...]) -> None:
    formula = compose.fold(terms, {"tanh": torch.tanh})
    score = torch.linspace(-6, 6, 41, dtype=torch.float64, requires_grad=True)
    distance = torch.arange(41, dtype=torch.float64)
    operands = tuple(OPERANDS[term.name] for term in terms)
    dscore = torch.linspace(1, 2, 41, dtype=torch.float64)
    (expected,) = torch.autograd.grad(formula.step(score, distance, operands), score, dscore)
    actual = formula.dstep(dscore, score.detach(), distance, operands)
    assert torch.allclose(actual, expected, rtol=1e-12, atol=0)


def test_terms_fold_in_the_documented_order() -> None:
    formula = compose.fold(scores.ORDER, {"tanh": torch.tanh})
    score, distance = torch.tensor(3.0, dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64)
    expected = 2.0 * torch.tanh(score / 2.0) - 0.5 * distance + 7.0
    assert formula.step(score, distance, (2.0, 0.5, 7.0)) == expected


def test_bind_gives_each_compiler_its_own_primitives() -> None:
    doubled = compose.fold((scores.SOFTCAP,), {"tanh": lambda x: 2 * x})
    assert doubled.step(3.0, 0, (4.0,)) == 6.0
    assert compose.fold((scores.SOFTCAP,), {"tanh": lambda x: x}).step(3.0, 0, (4.0,)) == 3.0
    with pytest.raises(NotImplementedError, match="bind"):
        scores.SOFTCAP.step(3.0, 0, 4.0)


def test_compiler_sees_one_function_that_covers_every_term() -> None:
    compiled: list[object] = []

    def compiler(function):  # type: ignore[no-untyped-def]
        compiled.append(function)
        return function

    formula = compose.fold(scores.ORDER, {"tanh": torch.tanh}, compiler)
    assert formula.step in compiled
    assert formula.dstep in compiled


ORDERED = {
    "scale before softcap": {"scale": 3.0, "softcap": 1.5},
    "bias after softcap": {"softcap": 1.5, "bias": (1, 2, 33, 70)},
    "alibi after softcap": {"softcap": 1.5, "alibi": True},
    "scale not applied to bias": {"scale": 0.1, "bias": (1, 2, 33, 70)},
    "mask after all": {"softcap": 1.5, "alibi": True, "bias": (1, 2, 33, 70), "mask": (1, 2, 33, 70)},
}


@pytest.mark.parametrize("features", ORDERED.values(), ids=ORDERED)
def test_order_of_terms(backend: Target, features: dict[str, object]) -> None:
    check(backend, dense(backend, Shape(n_q=33, n_k=70), **features))


def test_alibi_distance_is_absolute_and_bottom_right(backend: Target) -> None:
    """With q = 0 the LSE is a sum over `exp(-slope * distance)` that one can write down."""
    case = dense(backend, Shape(heads=1, n_q=3, n_k=5, dim=8), alibi=True)
    case = case.replace(q=torch.zeros_like(case.tensors["q"]))
    lse = run(backend, case, gradients=False)["lse"][0, 0].double().cpu()
    for row, distances in enumerate([(2, 1, 0, 1, 2), (3, 2, 1, 0, 1), (4, 3, 2, 1, 0)]):
        expected = torch.tensor([-0.5 * d for d in distances], dtype=torch.float64).logsumexp(0)
        assert abs(lse[row] - expected) < 4 * torch.finfo(torch.float32).eps * expected.abs()


def test_alibi_distance_ignores_the_causal_alignment(backend: Target) -> None:
    check(backend, dense(backend, Shape(n_q=20, n_k=50), alibi=True, causal="top-left"))


def test_slopes_and_sinks_of_another_float_type(backend: Target) -> None:
    case = dense(backend, Shape(n_q=20, n_k=50), torch.bfloat16, alibi=True, sinks=True)
    tensors = {name: case.tensors[name].double() for name in ("alibi_slopes", "sinks")}
    check(backend, Case({**case.tensors, **tensors}, case.dout, case.dlse, case.options))
