"""One measured call of attention in a process of its own, for a profiler to watch.

    python -m ioattn.bench.workload naive|sdpa|ioattn B H N D DTYPE CAUSAL BACKWARD

Everything is run once to compile and allocate; then the profiler is turned on around one call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ioattn import registry
from ioattn.cases import DTYPE_NAMES
from ioattn.io.measure import BACKEND
from ioattn.problem import Options, Problem, Tensors


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Three steps, each intermediate in memory: q @ k.T, softmax, @ v."""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if causal:
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill_(hidden, -torch.inf)
    return torch.softmax(scores, -1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Torch's fused attention, whichever fused backend torch prefers; never its step-by-step one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """`ioattn.attention` on the backend that it chooses."""
    import ioattn

    out = ioattn.attention(q, k, v, causal=causal)
    assert isinstance(out, Tensor)
    return out


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = {
    "naive": naive,
    "sdpa": sdpa,
    "ioattn": ours,
}


def main(arguments: Sequence[str]) -> None:
    """Run the workload that the command line describes."""
    name, *sizes, dtype, causal, backward = arguments
    shape = tuple(map(int, sizes))
    q, k, v = (torch.randn(shape, dtype=DTYPE_NAMES[dtype], device="cuda") for _ in range(3))
    dout = torch.randn_like(q)
    attention = IMPLEMENTATIONS[name]
    if name == "ioattn":
        options = Options.of(causal == "1", None, None, None, False)
        runs = registry.choose(Problem.of(Tensors.of(q, k, v), options), backward=backward == "1")
        sys.stdout.write(f"{BACKEND}{runs.name}\n")
    for x in (q, k, v):
        x.requires_grad_(backward == "1")
    for measured in (False, True):
        # A backward is measured without its forward, which has to run outside the range.
        out = attention(q, k, v, causal == "1") if backward == "1" else None
        torch.cuda.synchronize()
        if measured:
            torch.cuda.cudart().cudaProfilerStart()
        if out is None:
            attention(q, k, v, causal == "1")
        else:
            torch.autograd.grad(out, (q, k, v), dout)
        torch.cuda.synchronize()
        if measured:
            torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main(sys.argv[1:])
