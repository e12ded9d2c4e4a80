"""How much memory one forward + backward needs, measured in a process of its own.

`measure` starts a process that allocates q, k, v and the output's gradient, notes the memory
in use, runs, and notes the peak: on a CPU of the resident set, on a GPU of torch's allocator. The difference is the
extra memory: output, LSE, gradients and everything temporary.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ioattn
from ioattn.cli.demo.model import Attend, io_attention, standard_attention

DIM = 64
SCORE_BYTES = 4  # fp32

_WARM_UP_TOKENS = 256
_PROGRAM = f"from {__name__} import main; main()"
_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Task:
    """One measurement: causal attention of one head of dimension 64 with ALiBi, fp32, forward + backward."""

    implementation: str
    tokens: int
    device: str
    checked_rows: int = 0


@dataclass(frozen=True)
class Measurement:
    """The outcome; `errors` compares sampled rows with float64, see `check_rows`."""

    extra_bytes: int
    seconds: float
    backend: str | None
    errors: dict[str, tuple[float, float]]


def human(size: int) -> str:
    """A number of bytes with a unit; 2**30 is 1.0 GiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def matrices_bytes(tokens: int, heads: int = 1) -> int:
    """What S and P alone need in fp32: the two N x N matrices that the standard forward cannot avoid."""
    return 2 * SCORE_BYTES * heads * tokens**2


def available_bytes(device: torch.device) -> int | None:
    """How much memory can be had on `device` now; None: not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not _MEMINFO.exists():
        return None
    line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def standard_fits(tokens: int, device: torch.device) -> bool:
    """Whether standard attention may be tried: its forward + backward holds up to eight N x N matrices."""
    available = available_bytes(device)
    return available is not None and 4 * matrices_bytes(tokens) < available / 2


def measure(task: Task) -> Measurement:
    """Run `task` in a fresh process, so that no memory of earlier work is there to be used again."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(asdict(task))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"measuring {task} failed with exit code {done.returncode}:\n{done.stderr}")
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """What the fresh process runs: the task on the command line, as JSON."""
    sys.stdout.write(json.dumps(asdict(run(Task(**json.loads(sys.argv[1]))))) + "\n")


def run(task: Task) -> Measurement:
    """Measure `task` in this process."""
    attend = {"standard": standard_attention, "ioattn": io_attention}[task.implementation]
    device = torch.device(task.device)
    slopes = torch.tensor([2.0**-8], device=device)
    _forward_backward(attend, _inputs(_WARM_UP_TOKENS, device), slopes)
    inputs = _inputs(task.tokens, device)
    before = _restart_peak(device)
    start = time.perf_counter()
    out = _forward_backward(attend, inputs, slopes)
    extra = _peak(device) - before
    seconds = time.perf_counter() - start
    q, k, v, _ = inputs
    errors = check_rows(inputs, slopes, (out, q.grad), task.checked_rows) if task.checked_rows else {}
    chosen = ioattn.explain(q, k, v, causal=True, alibi_slopes=slopes).chosen
    return Measurement(max(extra, 0), seconds, chosen if task.implementation == "ioattn" else None, errors)


def check_rows(
    inputs: tuple[Tensor, ...], slopes: Tensor, results: tuple[Tensor, Any], count: int
) -> dict[str, tuple[float, float]]:
    """The largest error of sampled rows of out and dq against float64, and how large it may be.

    It may be twice (the error of standard attention in the same dtype on the same rows + eps * max|exact|).
    """
    tokens = inputs[0].shape[-2]
    rows = torch.linspace(0, tokens - 1, min(count, tokens), dtype=torch.float64).round().long()
    rows = rows.to(inputs[0].device)
    exact = _rows_of_standard(inputs, slopes, rows, torch.float64)
    standard = _rows_of_standard(inputs, slopes, rows, inputs[0].dtype)
    errors = {}
    for name, ours, theirs, truth in zip(("out", "dq"), results, standard, exact, strict=True):
        error = (ours.detach()[..., rows, :].double() - truth).abs().max().item()
        allowed = (theirs.double() - truth).abs().max() + torch.finfo(theirs.dtype).eps * truth.abs().max()
        errors[name] = (error, 2 * allowed.item())
    return errors


def _rows_of_standard(
    inputs: tuple[Tensor, ...], slopes: Tensor, rows: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """out and dq of some rows, by the definition: a row needs all keys but no other row."""
    q, k, v, dout = (x.detach().to(dtype) for x in inputs)
    q, dout, scale = q[..., rows, :], dout[..., rows, :], q.shape[-1] ** -0.5
    distance = rows[:, None] - torch.arange(k.shape[-2], device=k.device)
    scores = scale * (q @ k.mT) - slopes.to(dtype)[:, None, None] * distance.abs()
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    out = weights @ v
    dscores = weights * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return out, scale * (dscores @ k)


def _inputs(tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, tokens, DIM, device=device) for _ in range(4))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def _forward_backward(attend: Attend, inputs: tuple[Tensor, ...], slopes: Tensor) -> Tensor:
    q, k, v, dout = inputs
    out = attend(q, k, v, slopes)
    out.backward(dout)
    if q.is_cuda:
        torch.cuda.synchronize(q.device)
    return out


def _restart_peak(device: torch.device) -> int:
    """Forget the peak so far; returns the memory in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if _STATUS.exists():
        # Linux: 5 sets the peak of the resident set back to its present size.
        Path("/proc/self/clear_refs").write_text("5")
    return _peak(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        # Not getrusage: its figure starts at the peak of the process that started this one.
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
