"""Fixtures: every test that asks for `backend` runs on each backend and device that works here."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch
from attend import Target

import ioattn
from ioattn import registry
from ioattn.backends import eager

SHARED_MEMORY = 2**32
"""Bytes that a test may keep from others that run beside it on the same GPU."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than 30 seconds on 2 cores")
    if os.environ.get("TRITON_INTERPRET"):
        from interpreter import speed_up

        speed_up()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Skip, with the reasons, a test whose problem a fast backend declines; the specification may not decline any."""
    outcome = yield
    target = pyfuncitem.funcargs.get("backend")
    if outcome.excinfo is None or target is None or target.name == "eager":
        return
    told = "".join(traceback.format_exception(outcome.excinfo[1])) + str(getattr(outcome.excinfo[1], "stderr", ""))
    refusal = re.search(rf"UnsupportedProblemError: (no backend that was asked runs .*\({target.name}: .*\))", told)
    if refusal:
        outcome.force_exception(pytest.skip.Exception(refusal[1]))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        targets = [pytest.param(t, marks=[pytest.mark.gpu] if t.device == "cuda" else []) for t in usable_targets()]
        metafunc.parametrize("backend", targets, ids=str, indirect=True)


def usable_targets() -> list[Target]:
    """Every backend that works here, on every device that it accepts."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [Target(name, device) for name in registry.names() for device in devices if _accepts(name, device)]


def _accepts(name: str, device: str) -> bool:
    inputs = [torch.zeros(1, 1, 8, 16, device=device, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    return not all(dict(ioattn.explain(x, x, x).verdicts)[name] for x in inputs)


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """A backend and its device; eager gets its smallest tiles, 16 x 16, so that small cases cross many of them."""
    target: Target = request.param
    threads = torch.get_num_threads()
    if target.name == "eager" and "natural_tiles" not in request.fixturenames:
        monkeypatch.setattr(eager, "TILE_SCORES", 1)
        # Two threads have nothing to share in a tile of this size but the wait for each other.
        torch.set_num_threads(1)
    yield target
    torch.set_num_threads(threads)
    if target.device == "cuda" and torch.cuda.memory_reserved() > SHARED_MEMORY:
        torch.cuda.empty_cache()


@pytest.fixture
def natural_tiles() -> None:
    """Asked for by tests whose sizes make small tiles slow."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory that torch hands out uninitialised, so that an element that nobody wrote shows."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
        (torch._C._dynamo.guards, "_empty_strided_cpu"),
        (torch._C._dynamo.guards, "_empty_strided_cuda"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        fresh = allocate(*args, **kwargs)
        if torch.compiler.is_compiling():
            return fresh
        with torch.no_grad():
            if fresh.is_floating_point() or fresh.is_complex():
                return fresh.fill_(torch.nan)
            return fresh.fill_(True if fresh.dtype == torch.bool else torch.iinfo(fresh.dtype).max)

    return allocate_poisoned
