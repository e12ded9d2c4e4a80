"""Schedules of attention as algorithms over a counting memory: true results, and what it took to get them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ioattn.io.ledger import Traffic
from ioattn.io.memory import Memory, Slow
from ioattn.io.schedules import fa1, fa2, naive, printed, split_kv, two_pass
from ioattn.io.schedules.task import Task
from ioattn.io.threads import one_thread
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import Direction, predict
from ioattn.problem import Problem

Algorithm = Callable[[Task, Memory], dict[str, Slow]]


@dataclass(frozen=True)
class Schedule:
    """A forward, its backward where it has one, and what that backward needs from the forward.

    Which of both a schedule is predicted for is said by `ioattn.io.traffic.FORMULAS`.
    """

    forward: Algorithm
    backward: Algorithm | None = None
    kept: tuple[str, ...] = ()


SCHEDULES: Mapping[str, Schedule] = {
    "naive": Schedule(naive.forward_three_pass, naive.backward_three_pass, ("P",)),
    "fused-softmax": Schedule(naive.forward_fused, naive.backward_fused, ("P",)),
    "fa1": Schedule(fa1.forward, fa1.backward, ("m", "l")),
    "fa2": Schedule(fa2.forward, fa2.backward, ("LSE",)),
    "two-pass": Schedule(fa2.forward, two_pass.backward, ("LSE",)),
    "split-kv": Schedule(split_kv.forward),
    "as-printed": Schedule(printed.forward),
}
"""By name; `as-printed` is the wrong one."""


@dataclass(frozen=True)
class Counted:
    """The result of a schedule and what it moved: O and statistics of a forward, dQ, dK and dV of a backward."""

    results: Mapping[str, Tensor]
    traffic: Traffic


def count(
    problem: Problem,
    schedule: str,
    direction: Direction,
    given: Mapping[str, Tensor],
    blocks: Blocks | None = None,
    capacity: int | None = None,
    on_move: Callable[[int], object] | None = None,
) -> Counted:
    """Run a schedule over a chip of `capacity` bytes and count what it moves.

    Args:
        problem: what `given` describes; its score terms must be none.
        schedule: a name in `SCHEDULES`.
        direction: "forward" or "backward".
        given: "Q" `(B, H, Nq, D)`, "K" `(B, Hk, Nk, D)`, "V" `(B, Hk, Nk, Dv)`; for a backward also "dO".
        blocks: tile sizes, 64x64 unless given.
        capacity: bytes on the chip; None gives what the prediction asks for, so that a wrong one is refused.
        on_move: hears of the bytes of each move.

    Returns:
        the results and the count. A backward runs its forward first and counts itself only.

    Raises:
        ValueError: if the schedule does not exist, has no such direction or does not cover the problem.
        CapacityError: if a tile does not fit.

    Example:
        >>> from ioattn.cases import problem_of
        >>> problem = problem_of((1, 1, 128, 16), "fp32")
        >>> q, k, v = torch.randn(3, 1, 1, 128, 16)
        >>> count(problem, "fa2", "forward", {"Q": q, "K": k, "V": v}).traffic.of("K", "V")
        32768
    """
    blocks = blocks or Blocks()
    expected = predict(problem, schedule, direction, blocks)
    algorithm = SCHEDULES[schedule]
    if capacity is None:
        capacity = expected.on_chip
    kept: Mapping[str, Tensor] = {}
    if direction == "backward":
        kept = _results(Memory(None, problem.compute_dtype), algorithm.forward, Task(problem, blocks, given))
    run = algorithm.forward if direction == "forward" else algorithm.backward
    assert run is not None
    memory = Memory(capacity, problem.compute_dtype, on_move)
    task = Task(problem, blocks, {**given, **kept}, frozenset(algorithm.kept))
    return Counted(_results(memory, run, task), memory.traffic())


def _results(memory: Memory, algorithm: Algorithm, task: Task) -> dict[str, Tensor]:
    with one_thread():
        return {name: memory.values(slow) for name, slow in algorithm(task, memory).items()}
