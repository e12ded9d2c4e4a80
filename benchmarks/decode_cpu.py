"""Times one query over 32,768 cached keys on this CPU: GB/s of K and V, beside torch's attention and a plain read.

    python benchmarks/decode_cpu.py [--seconds 20] [--csv decode-cpu.csv]

The plain read is torch's sum over as many float32 bytes, on the same threads, in turns with the rest. A result is
compared with float64 before it is timed.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import ioattn
from ioattn.bench.timer import alternate

KEYS, PAGES = 32768, (16, 64, 256)
COLUMNS = "date,commit,machine,torch,triton,case,direction,implementation,median_us,spread,rate,unit,error"


def paged(k: Tensor, v: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """The caches cut into pages in no order, and the block table."""
    order = torch.randperm(KEYS // page)
    caches = (x.unflatten(2, (-1, page)).transpose(1, 2)[0][order].contiguous() for x in (k, v))
    return (*caches, order.argsort().int()[None])


def measure(dtype: torch.dtype, heads: int, kv_heads: int, seconds: float) -> list[list[str]]:
    """One case, all implementations in turns."""
    torch.manual_seed(0)
    dim = 128
    q, k, v = (torch.randn(1, h, n, dim).to(dtype) for h, n in ((heads, 1), (kv_heads, KEYS), (kv_heads, KEYS)))
    size = 2 * k.numel() * k.element_size()
    plain = torch.zeros(size // 4)
    options = {"cache_seqlens": KEYS, "backend": "cpu"}
    calls: dict[str, Callable[[], object]] = {
        "ioattn:cpu": lambda: ioattn.attention_decode(q, k, v, **options),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=heads != kv_heads),
        "read": plain.sum,
    }
    for page in PAGES:
        kp, vp, table = paged(k, v, page)
        calls[f"ioattn:cpu page {page}"] = lambda kp=kp, vp=vp, table=table: ioattn.attention_decode(
            q, kp, vp, block_table=table, **options
        )
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=heads != kv_heads)
    errors = {}
    for name, call in calls.items():
        out = call()
        if name != "read" and isinstance(out, Tensor):
            errors[name] = ((out.double() - exact).abs().max() / exact.abs().max()).item()
            if not errors[name] < (1e-5 if dtype == torch.float32 else 2e-2):
                raise ValueError(f"{name} is wrong by {errors[name]:.1e}")
    timings = dict(zip(calls, alternate(list(calls.values()), seconds, 5), strict=True))
    case = f"B1 H{heads}/{kv_heads} N1x{KEYS} D{dim} {str(dtype).removeprefix('torch.')} cpu"
    stamp = [datetime.date.today().isoformat(), "", platform.processor() or platform.machine(), torch.__version__, ""]
    rows = []
    for name, timing in timings.items():
        rate = size / timing.median_us / 1e3
        of_read, of_sdpa = (timings[peer].median_us / timing.median_us for peer in ("read", "sdpa"))
        error = f"{errors[name]:.1e}" if name in errors else ""
        compared = f"of a read {of_read:.2f}  to sdpa {of_sdpa:.2f}"
        sys.stdout.write(f"{case} {name:<20} {rate:6.1f} GB/s  {compared}  {error}\n")
        numbers = [f"{timing.median_us:.1f}", f"{timing.spread:.3f}", f"{rate:.1f}", "GB/s", error]
        rows.append([*stamp, case, "decode", name, *numbers])
    return rows


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20, help="for everything")
    parser.add_argument("--csv", default="", help="write the rows to this file")
    options = parser.parse_args()
    rows = [COLUMNS.split(",")]
    cases = [(dtype, *heads) for dtype in (torch.float32, torch.bfloat16) for heads in ((8, 8), (32, 8))]
    for dtype, heads, kv_heads in cases:
        rows += measure(dtype, heads, kv_heads, options.seconds / len(cases))
    if options.csv:
        with Path(options.csv).open("w", newline="") as file:
            csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
