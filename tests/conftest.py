"""Fixtures: every test that asks for `backend` runs on each backend and device that works here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from attend import Target

import ioattn
from ioattn import registry
from ioattn.backends import eager


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than 30 seconds on 2 cores")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", usable_targets(), ids=str, indirect=True)


def usable_targets() -> list[Target]:
    """Every backend that works here, on every device that it accepts."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [Target(name, device) for name in registry.names() for device in devices if _accepts(name, device)]


def _accepts(name: str, device: str) -> bool:
    x = torch.zeros(1, 1, 8, 16, device=device)
    return not dict(ioattn.explain(x, x, x).verdicts)[name]


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
