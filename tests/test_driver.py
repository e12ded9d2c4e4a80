"""The driver's own call: what it is handed for tensors that lie like those of the first call."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from ioattn import driver
from ioattn.backends.triton import call

SIGNATURE = {"inputs": (("*bf16", "i32", "constexpr"), "fp32"), "out": "*fp32", "form": "constexpr"}


class Driver:
    """Remembers what it is told to start; refuses when it shall."""

    def __init__(self) -> None:
        self.started: list[tuple[int, list[int], tuple[int, ...], float]] = []
        self.result = 0

    def __call__(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        given = config._obj
        first, second, third, fourth = list(parameters)[:4]
        addresses = [ctypes.c_uint64.from_address(at).value for at in (first, fourth)]
        numbers = (ctypes.c_int32.from_address(second).value, ctypes.c_float.from_address(third).value)
        sizes = (*given.grid, *given.block, given.shared, given.attribute_count)
        self.started.append((function.value, addresses, (*sizes, given.stream or 0), numbers))  # type: ignore[arg-type]
        return self.result


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "_launch_function", lambda: made)
    return made


def kernel(function: int = 7, early: bool = False) -> Any:
    metadata = SimpleNamespace(launch_pdl=early)
    return SimpleNamespace(
        src=SimpleNamespace(signature=SIGNATURE), packed_metadata=(4, 1, 1000), metadata=metadata, function=function
    )


def arguments(x: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
    return ((x, 18, None), 0.5), out, "form"


def test_numbers_stay_and_addresses_are_those_of_the_call(started: Driver) -> None:
    x, out = torch.empty(4, dtype=torch.bfloat16), torch.empty(4)
    queue = driver.Queue(3)
    queue.add(kernel(), 11, arguments(x, out), {id(x): 0, id(out): 2})
    queue.add(kernel(8, early=True), 12, arguments(x, out), {id(x): 0, id(out): 2})
    others = [torch.empty_like(x), None, torch.empty_like(out)]
    assert queue.start(others, 99)
    addresses = [others[0].data_ptr(), others[2].data_ptr()]  # type: ignore[union-attr]
    assert started.started == [
        (7, addresses, (11, 1, 1, 128, 1, 1, 1000, 0, 99), (18, 0.5)),
        (8, addresses, (12, 1, 1, 128, 1, 1, 1000, 1, 99), (18, 0.5)),
    ]


def test_a_launch_that_the_driver_refuses_is_told(started: Driver) -> None:
    x, out = torch.empty(4), torch.empty(4)
    queue = driver.Queue(2)
    for _ in range(2):
        queue.add(kernel(), 1, arguments(x, out), {id(x): 0, id(out): 1})
    started.result = 201
    assert not queue.start([x, out], 0)
    assert len(started.started) == 1


def test_a_tensor_that_is_none_of_the_call_is_refused(started: Driver) -> None:
    x, out = torch.empty(4), torch.empty(4)
    with pytest.raises(KeyError):
        driver.Queue(1).add(kernel(), 1, arguments(x, out), {id(x): 0})


@pytest.mark.parametrize("name", driver.SCRATCH)
def test_a_kernel_that_wants_memory_of_tritons_is_refused(started: Driver, name: str) -> None:
    x, out = torch.empty(4), torch.empty(4)
    made = kernel()
    setattr(made.metadata, name, 4424)
    with pytest.raises(KeyError, match=name):
        driver.Queue(2).add(made, 1, arguments(x, out), {id(x): 0, id(out): 1})


class Prepared:
    """A kernel as `Call` sees it; the first time it fails, after a call from within."""

    def __init__(self, handed: list[Any]) -> None:
        self.handed, self.runner, self.programs, self.constant = handed, None, 5, ("form",)
        self.during: Any = None

    def __call__(self, given: tuple[Any, ...]) -> None:
        self.handed.append(given[1])
        if len(self.handed) == 1:
            self.during()
            raise RuntimeError("out of memory")
        self.runner = SimpleNamespace(kernel=kernel())  # type: ignore[assignment]


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(get_current_stream=lambda device: 5 + device, get_current_device=lambda: 2)
    monkeypatch.setattr(call, "INTERPRETED", False)
    monkeypatch.setattr(call.triton.runtime, "driver", SimpleNamespace(active=active))


@pytest.mark.usefixtures("compiling")
def test_a_kernel_is_queued_only_after_it_has_been_compiled(started: Driver) -> None:
    """Another thread, or a call after one that failed, finds it without its runner."""
    x, out = torch.empty(4), torch.empty(4)
    prepared = Prepared([])
    start = call.Call([[prepared]], lambda given: [arguments(*given)[:2]])  # type: ignore[list-item]
    prepared.during = lambda: start((x, out))
    with pytest.raises(RuntimeError, match="out of memory"):
        start((x, out))
    start((out, x))
    start((out, x))
    assert prepared.handed == [out, out]
    assert [addresses for _, addresses, _, _ in started.started] == [[out.data_ptr(), x.data_ptr()]] * 2
    assert started.started[0][2][-1] == 7


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("why", ["watched", "refused", "copied"])
def test_what_cannot_be_queued_goes_by_way_of_triton(
    why: str, started: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, out = torch.empty(8)[::2], torch.empty(4)
    prepared = Prepared([None])
    made = (lambda given: arguments(given[0].contiguous(), given[1])) if why == "copied" else (lambda g: arguments(*g))
    start = call.Call([[prepared]], lambda given: [made(given)[:2]])  # type: ignore[list-item]
    start((x, out))
    monkeypatch.setattr(call, "is_watched", lambda: why == "watched")
    started.result = 201 if why == "refused" else 0
    start((x, out))
    assert prepared.handed == [None, out, out]
