"""Reads a kernel's intermediate code: which barriers in shared memory are made and then not kept."""

from __future__ import annotations

import re


def abandoned_barriers(ttgir: str) -> list[str]:
    """Names of the barriers that no warp role waits for or arrives at.

    Their memory is given to something else, but the hardware goes on taking it for barriers: it writes their state
    there again after another process has had the GPU.
    """
    ready, _, roles = ttgir.partition("ttg.warp_specialize(")
    if not roles:
        raise ValueError("the kernel has no warp roles")
    parts = dict(re.findall(r"(%[\w#]+) = ttg\.memdesc_(?:index|subslice|subview) (%[\w#]+)", ready))
    made = {parts.get(bar, bar) for bar in re.findall(r"ttng\.init_barrier (%[\w#]+)", ready)}
    named = set(re.findall(r"%[\w#]+", roles))
    kept = {parts.get(name, name) for name in named}
    return sorted(made - kept)
