"""One machine code for all compute groups of a kernel, whose warps meet only where they must.

Triton compiles each warp role for itself, also where several are the same function: a copy per group, and the
instruction cache has to hold them all. If the function takes from its threads' number which group it is, the copies
differ in nothing but the hardware barrier at which a role's threads meet: so all groups are sent to the first copy,
where that barrier's number is computed, and the assembler drops the others, which nothing reaches any more.

Triton also lets all of a role meet before it arrives at a barrier in shared memory or waits for one. Here each warp
arrives by itself, once its own reads are done, so barriers count four arrivals of a group; a wait needs nobody else.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from triton import knobs

_FIRST_BARRIER = 2
"""Where the threads of the first role after the default one meet; the next role's barrier is the next."""

_MEET = f"\tbar.sync \t{_FIRST_BARRIER}, 128;"
_ARRIVE = re.compile(r"\t@%p\d+ (mbarrier\.arrive\.shared.*)")
_WAIT = "mbarrier.try_wait"
_MEMORY = re.compile(r"\t(?:@\S+ )?(?:ld|st|stmatrix|cp|fence|wgmma|bar|barrier|bra|mbarrier|atom|red)\b|\$L__BB\w+:")
_BEGIN = "// %bb.0:"
_STARTS = """\
\t.reg .pred \t%elected;
\t.reg .b32 \t%own;
\tmov.u32 \t%own, %laneid;
\tsetp.eq.u32 \t%elected, %own, 0;
\tmov.u32 \t%own, %tid.x;
\tshr.u32 \t%own, %own, 7;
\tadd.u32 \t%own, %own, 1;"""
"""One thread of each warp, and the barrier of its group: warp group 1 is the first after the default role's."""


class UnfamiliarCodeError(ValueError):
    """Triton writes kernels in another way than this file knows; a copy of the code per group still works."""


def one_code(ptx: str, groups: int, by_warp: bool) -> str:
    """The same kernel, where the first `groups` roles, one function in warp groups 1, 2, ..., run the first's code."""
    first, *others = _entries(ptx)[:groups] or [""]
    if not first or len(others) != groups - 1 or ptx.count(_MEET) == 0:
        raise UnfamiliarCodeError("this is not how Triton 3.6 and 3.9 write warp roles")
    for entry in others:
        ptx = re.sub(rf"\{entry}\b(?!:)", first, ptx)
    lines = ptx.splitlines()
    for at in _reached(lines, first):
        if by_warp and lines[at] == _MEET and _precedes_barrier(lines, at):
            lines[at] = ""
        elif groups > 1 and lines[at] == _MEET:
            lines[at] = _MEET.replace(f"{_FIRST_BARRIER},", "%own,")
        elif by_warp and (arrive := _ARRIVE.fullmatch(lines[at])):
            lines[at] = f"\tbar.warp.sync -1;\n\t@%elected {arrive[1]}"
        elif by_warp and "mbarrier.arrive" in lines[at]:
            raise UnfamiliarCodeError(f"an arrival of another form than Triton's: {lines[at]}")
    lines.insert(lines.index(_BEGIN) + 1, _STARTS)
    return "\n".join([*lines, ""])


def _entries(ptx: str) -> list[str]:
    """Where each role's code begins: a warp reads its role's number, and branches through a table or by comparisons."""
    role = r"ld\.shared\.b8 \t(%rs?\d+), \[.*\];\n"
    if jump := re.search(role + r"(?:.*\n){1,12}?\tbrx\.idx \t\1, (\S+);", ptx):
        table = re.search(rf"{re.escape(jump[2])}:\s*\.branchtargets([^;]*);", ptx)
        return re.findall(r"\$L\w+", table[1]) if table else []
    chain = re.search(role + r"(?:(?://.*| +//.*|\tsetp\.eq\.b16 .*|\t@%p\d+ bra .*)\n)+", ptx)
    return re.findall(r"bra \t(\$L\w+);", chain[0]) if chain else []


def _reached(lines: Sequence[str], entry: str) -> Iterator[int]:
    """The lines of a role: what is reached from its entry until it gives its registers back."""
    labels = {line.partition(":")[0]: at for at, line in enumerate(lines) if line.startswith("$L__BB")}
    waiting, seen = [labels[entry]], set()
    while waiting:
        at = waiting.pop()
        while at not in seen and "setmaxnreg.dec" not in lines[at]:
            seen.add(at)
            yield at
            branch = re.match(r"\t(@!?%p\d+ )?bra(?:\.uni)? \t(\$L__BB\w+);", lines[at])
            if branch:
                waiting.append(labels[branch[2]])
            if branch and not branch[1]:
                break
            at += 1


def _precedes_barrier(lines: Sequence[str], at: int) -> bool:
    """Whether what a role meets for here is to arrive at a barrier or to wait for one: no other memory is touched."""
    following = next(line for line in lines[at + 1 :] if _MEMORY.match(line))
    return _ARRIVE.fullmatch(following) is not None or _WAIT in following


@contextmanager
def shared_by(groups: int, by_warp: bool) -> Iterator[None]:
    """Compile with one code for so many compute groups: Triton's setting is the process's, this is for one thread."""
    owner = threading.get_ident()

    def add(*pipeline: Any) -> Any:
        if not pipeline:
            return "", ""  # asked for its part of a cache's key: `Config.code`
        if threading.get_ident() == owner:
            stages = pipeline[1]
            write: Callable[..., str] = stages["ptx"]
            stages["ptx"] = lambda source, metadata: one_code(write(source, metadata), groups, by_warp)
        return None

    with knobs.runtime.scope():
        if groups > 1 or by_warp:
            knobs.runtime.add_stages_inspection_hook = add
        yield
