"""Reads the machine code of a kernel: which uniform registers are read on a way on which nothing has written them.

The assembler of CUDA 12.8, which Triton 3.6 brings, sometimes computes half of a matrix descriptor in a block of code
that is jumped over on the way to where it is used. The result is wrong numbers or an illegal address, seen on an H200.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_WRITERS = ("U", "R2UR", "S2UR", "VOTEU", "REDUX")


class Instruction(NamedTuple):
    """One instruction: its address, its guard (or None), its name and its operands."""

    address: int
    guard: str | None
    name: str
    operands: str

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.search(r"0x([0-9a-f]+)", self.operands) if self.name.startswith("BRA") else None
        return int(found[1], 16) if found else None

    @property
    def writes(self) -> set[int]:
        """Uniform registers that it writes."""
        first = self.operands.split(",")[0].strip()
        found = re.fullmatch(r"UR(\d+)", first)
        if found is None or not self.name.startswith(_WRITERS) or self.name.startswith("UTMA"):
            return set()
        pair = ".64" in self.name or ".WIDE" in self.name
        return {int(found[1]), int(found[1]) + pair}

    @property
    def reads(self) -> set[int]:
        """Uniform registers that it reads: half a descriptor where the first matrix is in registers."""
        operands = self.operands.split(",", 1)[1:] if self.writes else [self.operands]
        found: set[int] = set()
        for operand in operands:
            found |= {int(n) for n in _UNIFORM.findall(operand)}
        if self.name.startswith("HGMMA"):
            base = int(re.search(r"gdesc\[UR(\d+)\]", self.operands)[1])  # type: ignore[index]
            from_registers = re.match(r"R\d+,\s*R\d+,", self.operands) is not None
            found |= set(range(base + 2 * from_registers, base + 4))
            found -= {base} if from_registers else set()
        elif ".64" in self.name and self.name.startswith("UIADD3"):
            found |= {n + 1 for n in found}
        return found


def instructions(lines: Sequence[str]) -> list[Instruction]:
    """The instructions in lines of `cuobjdump --dump-sass`."""
    found = (_LINE.match(line) for line in lines)
    return [Instruction(int(m[1], 16), m[2], m[3], _without_predicate(m[3], m[4].strip())) for m in found if m]


def _without_predicate(name: str, operands: str) -> str:
    """The operands without the predicate that R2UR may write beside its register."""
    return re.sub(r"^P\w+,\s*", "", operands) if name.startswith("R2UR") else operands


def unwritten_reads(lines: Sequence[str]) -> list[Instruction]:
    """Instructions that some path reaches with a uniform register that they read and that nothing on the path wrote."""
    code = instructions(lines)
    at_address = {op.address: at for at, op in enumerate(code)}
    known: list[frozenset[int] | None] = [None] * len(code)
    known[0] = frozenset()
    waiting = [0]
    while waiting:
        at = waiting.pop()
        before = known[at]
        assert before is not None
        after = before | code[at].writes
        for to in _successors(code, at, at_address):
            met = after if (there := known[to]) is None else there & after
            if met != there:
                known[to] = met
                waiting.append(to)
    return [op for op, before in zip(code, known, strict=True) if before is not None and not op.reads <= before]


def _successors(code: Sequence[Instruction], at: int, at_address: dict[int, int]) -> Iterator[int]:
    op = code[at]
    if op.target is not None:
        yield at_address[op.target]
    if op.guard is not None or (op.target is None and op.name != "EXIT"):
        yield at + 1
