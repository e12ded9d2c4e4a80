"""Threads of the CPU backend: the same bits however many there are, callers at the same time, fork, interrupts."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attend import Shape, Target, dense, packed, run
from oracle import Case, Result

import ioattn
from ioattn.backends import cpu
from ioattn.backends.cpu import launch, plan

pytestmark = pytest.mark.skipif(cpu.unusable() is not None, reason=str(cpu.unusable()))

CPU = Target("cpu", "cpu")

CASES = {
    "many heads": lambda: dense(CPU, Shape(heads=6, n_q=200, kv_heads=2, dim=32), causal=True),
    "chunks of keys": lambda: dense(CPU, Shape(heads=1, n_q=150, n_k=4100, dim=32), window=(3000, 5)),
    "few queries": lambda: dense(CPU, Shape(heads=2, n_q=2, n_k=9000, dim=64, kv_heads=1), sinks=True),
    "shared bias": lambda: dense(CPU, Shape(batch=2, heads=2, n_q=70, dim=32), bias=(1, 1, 70, 70), softcap=5.0),
    "bf16": lambda: dense(CPU, Shape(heads=2, n_q=130, n_k=3000, dim=64), torch.bfloat16),
    "packed": lambda: packed(CPU, [100, 0, 33, 257], [90, 4, 2100, 257], causal=True),
}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def same_bits(a: Result, b: Result) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def with_threads(count: int, case: Case) -> Result:
    torch.set_num_threads(count)
    return run(CPU, case)


@pytest.mark.parametrize("name", CASES)
def test_the_bits_do_not_depend_on_the_number_of_threads(name: str, threads: None) -> None:
    case = CASES[name]()
    one = with_threads(1, case)
    for count in (2, 3, 7):
        assert same_bits(one, with_threads(count, case))


@pytest.mark.parametrize("name", CASES)
def test_the_bits_do_not_change_from_run_to_run(name: str) -> None:
    case = CASES[name]()
    first = run(CPU, case, deterministic=True)
    assert all(same_bits(first, run(CPU, case, deterministic=True)) for _ in range(4))


def test_one_long_head_is_work_for_every_thread() -> None:
    q = torch.empty(1, 1, 1, 64)
    k = torch.empty(1, 1, 8192, 64)
    long = torch.empty(1, 1, 8192, 64)
    for tensors in ((q, k, k), (long, long, long)):
        problem = ioattn.explain(*tensors).problem
        assert plan.plan_forward(problem, tensors[0].shape[:-1], None).tasks >= 8
    assert plan.plan_backward(problem, long.shape[:-1], None, False).tasks >= 8


def test_many_cores_get_many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two each; blocks are whole panels, 72 queries and not 64 where vectors have 8 lanes: 58 tasks."""
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    q, k = torch.empty(1, 2, 2048, 64), torch.empty(1, 2, 65536, 64)
    for queries in (q, q[:, :, :1]):
        problem = ioattn.explain(queries, k, k).problem
        assert plan.plan_forward(problem, queries.shape[:-1], None).tasks >= 58
    assert plan.plan_backward(problem, q.shape[:-1], None, False).tasks >= 60


def test_callers_at_the_same_time_do_not_meet() -> None:
    cases = [make() for make in CASES.values()]
    expected = [run(CPU, case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        jobs = [(i, pool.submit(run, CPU, cases[i])) for i in list(range(len(cases))) * 6]
        assert all(same_bits(expected[i], job.result(timeout=120)) for i, job in jobs)


def test_the_thread_pool_stands_in_for_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["many heads"]()
    expected = run(CPU, case)
    monkeypatch.setattr(launch, "_openmp", lambda: None)
    assert same_bits(expected, run(CPU, case))


def test_torch_and_we_share_one_openmp() -> None:
    if sys.platform != "linux":
        pytest.skip("other systems' torch has another runtime")
    assert launch._openmp() is not None


FORKED = """
import os, signal, torch, ioattn
torch.set_num_threads(2)
q = torch.randn(1, 4, 300, 32)
expected = ioattn.attention(q, q, q, backend="cpu")
child = os.fork()
if child == 0:
    signal.alarm(60)
    out = ioattn.attention(q, q, q, backend="cpu")
    # torch's own operators would wait here for threads that the child does not have.
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(out, expected) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(ioattn.attention(q, q, q, backend="cpu"), expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_computes_with_all_threads() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_is_heard_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SLICE", 1e9)
    q = torch.randn(1, 64, 2048, 64)
    case_flops = 4.0 * 64 * 2048 * 2048 * 64
    assert case_flops > 40 * launch.SLICE
    slices: list[int] = []
    fan_out = launch.fan_out

    def counted(address: int, block: launch.Block, threads: int) -> None:
        slices.append(block[1] - block[0])
        fan_out(address, block, threads)

    monkeypatch.setattr(launch, "fan_out", counted)
    # A process that a shell script puts in the background is started deaf to it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        collections.deque((ioattn.attention(q, q, q, backend="cpu") for _ in range(20)), maxlen=0)
    timer.join()
    signal.signal(signal.SIGINT, before)
    assert len(slices) < 20 * 64 * 11 / (4 * torch.get_num_threads())
