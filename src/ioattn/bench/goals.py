"""Which named cases a benchmark runs, in which dtypes and directions, and what they are to reach against torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ioattn.io.traffic import Direction

BOTH: tuple[Direction, ...] = ("forward", "backward")

Speedups = Mapping[tuple[str, Direction], float]


@dataclass(frozen=True)
class Goal:
    """A case of `ioattn.cases.CASES`; `speedups` holds the wanted speed over torch by (dtype name, direction)."""

    case: str
    speedups: Speedups = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    directions: tuple[Direction, ...] = BOTH


def _speedups(forward: Mapping[str, float], backward: Mapping[str, float]) -> Speedups:
    wanted: dict[tuple[str, Direction], float] = {(dtype, "forward"): goal for dtype, goal in forward.items()}
    return wanted | {(dtype, "backward"): goal for dtype, goal in backward.items()}


_LONG = _speedups({"fp32": 1.2, "bf16": 2.0, "fp16": 1.6}, {"fp32": 1.15, "bf16": 1.6, "fp16": 10.0})
_SHORT = _speedups({"fp32": 1.3, "bf16": 2.2}, {"fp32": 1.3, "bf16": 2.0})
_ONE_HEAD = _speedups({"fp32": 1.5}, {"fp32": 2.0})
_FEATURE = _speedups({"fp32": 1.2, "bf16": 1.2}, {"fp32": 1.2, "bf16": 1.2})
_FEW = _speedups({"fp32": 1.0, "bf16": 1.0}, {})
_TWO: tuple[str, ...] = ("fp32", "bf16")
_FORWARD: tuple[Direction, ...] = ("forward",)

CPU_GOALS = (
    *(Goal(name, _LONG) for name in ("long-d64", "long-d64-causal", "long-d128", "long-d128-causal")),
    Goal("short-128", _SHORT, _TWO),
    Goal("short-512", _SHORT, _TWO),
    Goal("one-head", _ONE_HEAD, _TWO),
    *(Goal(name, _FEATURE, _TWO) for name in ("bias", "mask", "window-256", "softcap", "gqa-8-2")),
    *(Goal(f"queries-{n}", _FEW, _TWO, _FORWARD) for n in (1, 2, 4, 8, 16)),
    Goal("tiny", _speedups({"fp32": 1.0}, {}), ("fp32",), _FORWARD),
)
"""What `ioattn bench cpu` runs, in the order of its table."""

_BF16: tuple[str, ...] = ("bf16",)

GPU_GOALS = (
    *(
        Goal(f"d{dim}-n{length}{suffix}", dtypes=_TWO if length == 4096 and dim < 256 else _BF16)
        for dim in (64, 128, 256)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
        for suffix in ("", "-causal")
    ),
    *(Goal(f"grouped-{heads}-8{suffix}", dtypes=_BF16) for heads in (32, 64) for suffix in ("", "-causal")),
    *(Goal(f"window-1024-d{dim}", dtypes=_BF16) for dim in (64, 128)),
)
"""What `ioattn bench gpu` runs first, in the order of its table."""

GPU_FEATURES = tuple(
    Goal(f"with-{feature}", dtypes=_BF16)
    for feature in (
        *("nothing", "causal", "window", "softcap", "alibi", "bias", "mask", "sinks", "groups", "narrow-values"),
    )
)
"""One feature each, whose rates stand against that of the first."""
