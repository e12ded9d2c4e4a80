"""Numbers with units, and tables as aligned text."""

from __future__ import annotations

from collections.abc import Sequence


def size(n_bytes: float) -> str:
    """Bytes in powers of 1024, four digits.

    >>> size(203423744), size(7)
    ('194 MiB', '7 B')
    """
    value, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"


def rate(flops: float) -> str:
    """FLOP/s in powers of 1000.

    >>> rate(70.7e12)
    '70.7 TFLOP/s'
    """
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


def duration(seconds: float) -> str:
    """Seconds with a fitting unit.

    >>> duration(6.1e-5)
    '61 us'
    """
    for unit, factor in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def table(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Columns separated by two spaces, the first `left` of them aligned left, the others right."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    lines = [
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(line.rstrip() for line in lines)
