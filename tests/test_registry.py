"""Choosing a backend: order, objections, refusals, and the explanation that a user reads."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch

import ioattn
from ioattn import ops, registry
from ioattn.masks import Band
from ioattn.problem import Options, Problem, Tensors


class Fake(types.ModuleType):
    """A backend that fills its outputs with one number."""

    def __init__(self, name: str, fill: float, reasons: tuple[str, ...] = (), broken: str | None = None) -> None:
        super().__init__(f"fakes.{name}")
        self.name, self.fill, self.reasons, self.broken = name, fill, reasons, broken
        self.asked = 0
        self.problems: list[Problem] = []

    def unusable(self) -> str | None:
        return self.broken

    def objections(self, problem: Problem) -> list[str]:
        self.asked += 1
        return list(self.reasons)

    def forward(self, problem: Problem, tensors: Tensors, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.problems.append(problem)
        out.fill_(self.fill)
        lse.fill_(self.fill)

    def backward(self, problem, tensors, out, lse, dout, dlse, grads) -> None:  # type: ignore[no-untyped-def]
        for gradient in grads:
            if gradient is not None:
                gradient.fill_(self.fill)


def forget() -> None:
    """Drop what earlier choices left in caches."""
    registry.load.cache_clear()
    registry.choose.cache_clear()
    ops._plans.clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    def install_backends(*fakes: Fake) -> None:
        monkeypatch.setattr(registry, "MODULES", {fake.name: fake.__name__ for fake in fakes})
        for fake in fakes:
            monkeypatch.setitem(sys.modules, fake.__name__, fake)
        forget()

    forget()
    yield install_backends
    monkeypatch.undo()
    forget()


def some_problem() -> Problem:
    q = torch.zeros(2, 4, 9, 16)
    return Problem.of(Tensors(q, q, q), Options())


def called(**options: object) -> float:
    """The number that the backend which ran has filled in."""
    q = torch.zeros(1, 1, 2, 4)
    return ioattn.attention(q, q, q, **options)[0, 0, 0, 0].item()


def test_first_backend_without_objections_runs(install) -> None:
    install(Fake("picky", 1, ("does not like you",)), Fake("broken", 2, broken="no such device"), Fake("good", 3))
    assert registry.choose(some_problem()).name == "good"
    assert called() == 3


def test_order_of_preference_decides_between_two_that_could(install) -> None:
    install(Fake("one", 1), Fake("two", 2))
    assert called() == 1
    assert called(backend="two") == 2


def test_backward_runs_on_the_backend_of_the_forward(install) -> None:
    install(Fake("one", 1), Fake("two", 2))
    q = torch.zeros(1, 1, 2, 4, requires_grad=True)
    ioattn.attention(q, q.detach(), q.detach(), backend="two").sum().backward()
    assert (q.grad == 2).all()


def test_gradients_of_a_forward_only_backend_come_from_the_next(install) -> None:
    first = Fake("one", 1)
    first.forward_only = True
    install(first, Fake("two", 2, ("odd",)), Fake("three", 3))
    q = torch.zeros(1, 1, 2, 4, requires_grad=True)
    out = ioattn.attention(q, q.detach(), q.detach())
    assert (out == 1).all()
    out.sum().backward()
    assert (q.grad == 3).all()


def test_gradients_of_a_named_forward_only_backend_are_refused(install) -> None:
    first = Fake("one", 1)
    first.forward_only = True
    install(first, Fake("two", 2))
    q = torch.zeros(1, 1, 2, 4, requires_grad=True)
    out = ioattn.attention(q, q.detach(), q.detach(), backend="one")
    with pytest.raises(ioattn.UnsupportedProblemError, match="one: has no backward"):
        out.sum().backward()


def test_a_named_backend_never_falls_back(install) -> None:
    install(Fake("picky", 1, ("head dimension is odd", "too small")), Fake("good", 3))
    with pytest.raises(ioattn.UnsupportedProblemError) as raised:
        called(backend="picky")
    message = str(raised.value)
    assert "picky" in message
    assert "head dimension is odd" in message
    assert "too small" in message
    assert "\n" not in message
    assert "good" not in message
    assert isinstance(raised.value, ValueError)


def test_a_named_backend_that_cannot_run_here_says_why(install) -> None:
    install(Fake("broken", 2, broken="no such device; install one"), Fake("good", 3))
    with pytest.raises(ValueError, match="no such device; install one"):
        called(backend="broken")


def test_a_broken_backend_is_not_asked_for_objections(install) -> None:
    broken = Fake("broken", 2, broken="no such device")
    install(broken, Fake("good", 3))
    called()
    assert broken.asked == 0


def test_if_all_object_every_reason_is_listed(install) -> None:
    install(Fake("one", 1, ("reason one",)), Fake("two", 2, broken="reason two"))
    with pytest.raises(ioattn.UnsupportedProblemError) as raised:
        called()
    message = str(raised.value)
    assert "one: reason one" in message
    assert "two: reason two" in message
    assert "B1 H1 N2 D4 fp32 cpu" in message


def test_unknown_backend_names_those_that_exist(install) -> None:
    install(Fake("one", 1), Fake("two", 2))
    with pytest.raises(ValueError, match="backend is 'three'; it must be one of 'one', 'two', or None"):
        called(backend="three")


def test_each_call_is_described_anew(install) -> None:
    """What is remembered between calls must not outlive a change of strides, address or options."""
    only = Fake("only", 1)
    install(only)
    store = torch.zeros(4 * 9 * 16 + 4)
    aligned, moved = (store[at:][: 4 * 9 * 16].view(1, 4, 9, 16) for at in (0, 1))
    strided = aligned.view(1, 9, 4, 16).transpose(1, 2)
    for q, options in ((aligned, {}), (moved, {}), (aligned, {"causal": True}), (strided, {}), (aligned, {})):
        out = ioattn.attention(q, aligned, aligned, **options)
        assert only.problems[-1] == ioattn.explain(q, aligned, aligned, **options).problem
        assert out.stride() == torch.empty_like(q).stride()
    assert [problem.alignment for problem in only.problems] == [16, 4, 16, 16, 16]


def test_explain_lists_every_verdict(install) -> None:
    install(Fake("picky", 1, ("odd", "small")), Fake("good", 3), Fake("spare", 4))
    q = torch.zeros(2, 4, 9, 16)
    explained = ioattn.explain(q, q, q, causal=True, softcap=2.0)
    assert explained.chosen == "good"
    assert [(name, list(reasons)) for name, reasons in explained.verdicts] == [
        ("picky", ["odd", "small"]),
        ("good", []),
        ("spare", []),
    ]
    text = str(explained)
    assert text.splitlines()[0] == str(explained.problem)
    assert "causal" in text
    assert "softcap=2" in text
    assert [line.split(maxsplit=1) for line in text.splitlines()[1:]] == [
        ["picky", "odd; small"],
        ["good", "runs it"],
        ["spare", "could run it"],
    ]


def test_explain_where_nobody_can(install) -> None:
    install(Fake("picky", 1, ("odd",)))
    q = torch.zeros(2, 4, 9, 16)
    assert ioattn.explain(q, q, q).chosen is None


def test_explain_agrees_with_what_runs(install) -> None:
    install(Fake("picky", 1, ("odd",)), Fake("good", 3))
    q = torch.zeros(1, 1, 2, 4)
    chosen = ioattn.explain(q, q, q).chosen
    assert called() == called(backend=chosen)


def test_explain_takes_packed_inputs_and_refuses_unknown_ones() -> None:
    q, offsets = torch.zeros(9, 4, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    assert "packed" in str(ioattn.explain(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets))
    with pytest.raises(TypeError, match="slopes"):
        ioattn.explain(q, q, q, slopes=q)


def test_names_are_unique_and_eager_takes_everything() -> None:
    names = registry.names()
    assert len(set(names)) == len(names)
    assert registry.load("eager").unusable() is None
    assert registry.load("eager").objections(some_problem()) == []


@pytest.mark.parametrize("name", registry.names())
def test_each_backend_keeps_the_protocol(name: str) -> None:
    """Also where it cannot run: being asked must not raise, and a refusal must say something."""
    backend = registry.load(name)
    assert backend.name == name
    broken = backend.unusable()
    assert broken is None or (len(broken) > 10 and "\n" not in broken)
    reasons = backend.objections(some_problem())
    assert isinstance(reasons, list)
    assert all(isinstance(reason, str) and reason for reason in reasons)


def test_a_backend_that_cannot_be_imported_is_passed_over_and_named(install, monkeypatch) -> None:
    install(Fake("takes", 1.0))
    monkeypatch.setattr(registry, "MODULES", {"gone": "ioattn_has_no_such_module", **registry.MODULES})
    assert called() == 1.0
    with pytest.raises(ioattn.UnsupportedProblemError, match="gone: it cannot be imported: No module named"):
        called(backend="gone")


def test_explain_describes_what_runs_under_autocast(install) -> None:
    takes = Fake("takes", 1.0)
    install(takes)
    q = torch.zeros(1, 1, 2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        ioattn.attention(q, q, q)
        assert ioattn.explain(q, q, q).problem == takes.problems[-1]


def test_a_window_wider_than_the_problem_is_none(install) -> None:
    takes = Fake("takes", 1.0)
    install(takes)
    called(window=(2**62, 2**63 - 1))
    called(window=(1, 4))
    assert [problem.band for problem in takes.problems] == [Band(), Band(-1, None)]


def test_a_backend_gets_no_tensor_that_is_negated_lazily(install, monkeypatch) -> None:
    takes = Fake("takes", 1.0)
    install(takes)
    seen = []
    monkeypatch.setattr(takes, "forward", lambda problem, tensors, out, lse: seen.extend(tensors[:4]), raising=False)
    negated = torch.randn(1, 1, 4, 4, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    ioattn.attention(*(3 * [negated]))
    q = torch.zeros(1, 1, 4, 4)
    ioattn.attention(q, q, q, bias=negated)
    assert not any(x.is_neg() for x in seen if x is not None)


def test_a_traced_program_calls_the_backend(install) -> None:
    takes = Fake("takes", 1.0)
    install(takes)
    q = torch.zeros(1, 1, 2, 4)
    traced = torch.jit.trace(lambda x: ioattn.attention(x, x, x), (q,), check_trace=False)
    takes.fill = 5.0
    assert traced(q).eq(5.0).all()
