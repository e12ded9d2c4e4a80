"""What racecheck of compute-sanitizer reports, and which of it is behind a barrier that it does not follow."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ACCESS = re.compile(r"(Read|Write) access at \w+\+0x[0-9a-f]+ in ([\w.]+):(\d+)")

BEHIND_BARRIERS = {
    # The word by which Triton tells warps which role to run, and when it ends: between hardware barriers of its own.
    ("forward", "forward"),
    ("backward", "backward"),
    ("run_roles", "backward"),
    ("query_gradient", "query_gradient"),
    # Threads store, their group meets at a hardware barrier, one of them arrives at an mbarrier, the loader waits.
    ("report", "is_suspect"),
}
"""Functions that write and that read. The first five are kernels, which themselves touch no shared memory."""


def function_at(path: Path, line: int) -> str:
    """The innermost function of a file that holds a line."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or node.lineno)]
    return max(around, key=lambda node: node.lineno).name


def races(told: str, folder: Path) -> set[tuple[str, str]]:
    """Of each race in a report by `--racecheck-report analysis` the functions in `folder` that write and that read."""
    found = set()
    for report in told.split("Race reported between")[1:]:
        accesses = [(kind, function_at(folder / name, int(line))) for kind, name, line in ACCESS.findall(report)]
        for other in accesses[1:]:
            write, read = sorted((accesses[0], other), reverse=True)
            found.add((write[1], read[1]))
    return found
