"""`ioattn io paged`, `speculative` and `flashconv`: counting bytes elsewhere than in attention's kernels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ioattn.cli.io import options as o
from ioattn.io.flashconv import Convolution, count_fused, count_unfused, fused
from ioattn.io.flashconv import unfused as unfused_bytes
from ioattn.io.paged import Cache, churn, lengths_of, paging
from ioattn.io.speculative import Model, Round, best_draft, speculate
from ioattn.io.text import duration, size, table

PAGES = tuple(2**i for i in range(9))


def paged(
    sequences: Annotated[int, typer.Option(help="Sequences in the cache.")] = 256,
    mean: Annotated[int, typer.Option(help="Mean length; lengths are exponential.")] = 1024,
    longest: Annotated[int, typer.Option(help="What a contiguous cache reserves for each.")] = 8192,
    layers: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    itemsize: Annotated[int, typer.Option(help="Bytes of an element.")] = 2,
    seed: int = 0,
    as_json: o.AsJson = False,
    plot: o.Plot = None,
    theme: o.ThemeName = "light",
) -> None:
    """Bytes wasted by a paged KV cache against its page size, and by contiguous caches."""
    with o.user_errors():
        for name, value in (("sequences", sequences), ("mean", mean), ("longest", longest)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if mean > longest:
            raise ValueError(f"mean is {mean}; it must be at most the longest length, {longest}")
        cache = Cache(layers, kv_heads, dim, itemsize)
        lengths = lengths_of(sequences, mean, longest, seed)
        found = [paging(lengths, page, cache, longest) for page in PAGES]
        with o.busy(f"{20 * sequences} sequences come and go"):
            holes = churn(lengths_of(20 * sequences, mean, longest, seed), max(longest, sum(lengths)), seed)
        if plot is not None:
            from ioattn.io.plot import Line, lines

            pages = [float(p.page) for p in found]
            curves = [
                Line(pages, [100 * p.wasted for p in found], "paged"),
                Line(pages, [100 * p.contiguous_wasted for p in found], f"contiguous, {longest} reserved", dashed=True),
                Line(
                    pages, [100 * holes.fragmentation] * len(pages), "contiguous, exact: free but in holes", dashed=True
                ),
            ]
            title = f"KV cache of {sequences} sequences, mean {mean} tokens"
            lines(title, "tokens per page", "bytes without a token, %", curves, plot, theme, log="x")
    if as_json:
        listed = [{**vars(p), "wasted": p.wasted, "contiguous_wasted": p.contiguous_wasted} for p in found]
        typer.echo(o.as_text({"pages": listed, "churn": {**vars(holes), "fragmentation": holes.fragmentation}}))
        return
    rows = [
        (p.page, size(p.held), size(p.held - p.used), f"{p.wasted:.2%}", size(p.table), size(p.read)) for p in found
    ]
    typer.echo(f"{sequences} sequences, {sum(lengths)} tokens, {size(cache.token_bytes)} each: {size(found[0].used)}\n")
    typer.echo(table(("page", "held", "empty", "wasted", "block tables", "read per step"), rows))
    first = found[0]
    typer.echo(
        f"\ncontiguous, {longest} tokens reserved each: {size(first.contiguous)}, {first.contiguous_wasted:.1%} wasted"
    )
    typer.echo(
        f"contiguous, exact lengths, after {20 * sequences} arrivals: {holes.fragmentation:.1%} of the free space is "
        f"outside the largest hole; {holes.refused} times a sequence fitted the free space but no hole"
    )


def speculative(
    weights: Annotated[float, typer.Option(help="GB of the target's weights.")] = 140.0,
    draft_weights: Annotated[float, typer.Option(help="GB of the draft's weights.")] = 2.0,
    cache: Annotated[float, typer.Option(help="KiB of the target's K and V per token.")] = 320.0,
    draft_cache: Annotated[float, typer.Option(help="KiB of the draft's K and V per token.")] = 32.0,
    context: Annotated[int, typer.Option(help="Tokens in each sequence.")] = 4096,
    batch: int = 1,
    acceptance: Annotated[list[float] | None, typer.Option(help="Chance that a drafted token is accepted.")] = None,
    machine: o.MachineName = "h200",
    as_json: o.AsJson = False,
    plot: o.Plot = None,
    theme: o.ThemeName = "light",
) -> None:
    """Slow-memory bytes per accepted token against draft length and acceptance; the default is a 70B model in FP16."""
    with o.user_errors():
        sizes = {"weights": weights, "draft-weights": draft_weights, "cache": cache, "draft-cache": draft_cache}
        for name, value in sizes.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value:g}; it must be finite and not negative")
        target, draft = Model(weights * 1e9, cache * 1024), Model(draft_weights * 1e9, draft_cache * 1024)
        rates, on = acceptance or [0.5, 0.7, 0.8, 0.9], o.machine(machine)
        drafted = (0, 1, 2, 3, 4, 6, 8, 12, 16)
        series = {a: [speculate(target, draft, g, a, batch, context) for g in drafted] for a in rates}
        best = {a: best_draft(target, draft, a, batch, context) for a in rates}
        if plot is not None:
            from ioattn.io.plot import Line, lines

            curves = [
                Line([r.drafted for r in rounds], [r.bytes_per_token / 1e9 for r in rounds], f"acceptance {a:g}")
                for a, rounds in series.items()
            ]
            title = f"speculative decoding, {weights:g} GB target, {draft_weights:g} GB draft, batch {batch}"
            lines(title, "drafted tokens per round", "GB per accepted token", curves, plot, theme)
    if as_json:
        listed = [_round_dict(r) for rounds in series.values() for r in rounds]
        typer.echo(o.as_text({"rounds": listed, "best": [_round_dict(r) for r in best.values()]}))
        return
    header = ("drafted", *(f"accept {a:g}" for a in rates))
    rows = [(g, *(f"{series[a][i].bytes_per_token / 1e9:.4g} GB" for a in rates)) for i, g in enumerate(drafted)]
    typer.echo(f"bytes per accepted token, batch {batch}, {context} tokens of context each\n")
    typer.echo(table(header, rows))
    for a, r in best.items():
        least = duration(r.bytes_per_token / on.bandwidth)
        typer.echo(
            f"best at {a:g}: draft {r.drafted}, {r.tokens:.2f} tokens a round, {r.gain:.2f} times fewer bytes; "
            f"at least {least} per token on {on.name}"
        )


def _round_dict(r: Round) -> dict[str, float]:
    return {**vars(r), "bytes_per_token": r.bytes_per_token, "gain": r.gain}


def flashconv(
    batch: int = 8,
    channels: int = 768,
    length: int = 8192,
    machine: o.MachineName = "h100",
    verify: Annotated[bool, typer.Option("--count", help="Run it over the counting memory too.")] = False,
    as_json: o.AsJson = False,
    plot: o.Plot = None,
    theme: o.ThemeName = "light",
) -> None:
    """Bytes of a long convolution by FFT, step by step and fused on the chip, FP16 in and out."""
    with o.user_errors():
        it, on = Convolution(batch, channels, length), o.machine(machine)
        plain, one = unfused_bytes(it), fused(it)
        if plot is not None:
            _plot_convolution(batch, channels, plot, theme)
        checked = None
        if verify:
            # Both forms, the exact result and their spectra: about forty numbers of 8 bytes for each of 8 sequences.
            o.check_room(f"a convolution of length {length}", 8 * 40 * 8 * length)
            with o.busy("running both forms"):
                checked = _count_convolution(it)
    if as_json:
        listed = {"unfused": plain.total, "fused": one.total, "compulsory": it.compulsory, "on_chip": one.on_chip}
        typer.echo(o.as_text({**listed, "ratio": plain.total / one.total, "checked": checked}))
        return
    typer.echo(f"y = iFFT(FFT(u) * FFT(k)), B{batch} H{channels} N{length}, on {on.title}\n")
    rows = [
        (name, m.step, m.tensor, size(m.read), size(m.written))
        for name, t in (("unfused", plain), ("fused", one))
        for m in t.moves
    ]
    typer.echo(table(("form", "step", "tensor", "read", "written"), rows, left=3))
    for name, t in (("unfused", plain), ("fused", one)):
        typer.echo(f"{name}: {size(t.total)}, {t.intensity:.3g} FLOP/B, at least {duration(t.total / on.bandwidth)}")
    fits = (
        "fits" if one.on_chip <= on.sram else f"does not fit the {size(on.sram)} of one core: cut N into state blocks"
    )
    typer.echo(f"{plain.total / one.total:.2f} times fewer bytes fused; {size(one.on_chip)} on chip: {fits}")
    if checked is not None:
        typer.echo(checked)


def _count_convolution(it: Convolution) -> str:
    """Runs a few channels and states what was found; raises ValueError where a count or a result is wrong."""
    small = Convolution(min(it.batch, 2), min(it.channels, 4), it.length)
    u = torch.randn(small.batch, small.channels, small.length, generator=torch.Generator().manual_seed(0)).half()
    k = torch.randn(small.channels, small.length, generator=torch.Generator().manual_seed(1)).half() / small.length
    n = 2 * small.length
    exact = torch.fft.irfft(torch.fft.rfft(u.double(), n) * torch.fft.rfft(k.double(), n), n)[..., : small.length]
    bound = 2 * (float((exact.half() - exact).abs().max()) + torch.finfo(torch.float16).eps * float(exact.abs().max()))
    for name, run, formula in (("fused", count_fused, fused), ("unfused", count_unfused, unfused_bytes)):
        y, counted = run(u, k)
        error = float((y.double() - exact).abs().max())
        if sorted(map(str, counted.moves)) != sorted(map(str, formula(small).moves)) or error > bound:
            raise ValueError(f"{name} is not as predicted: {counted.total} bytes, error {error:.3g}, bound {bound:.3g}")
    return (
        f"counted on B{small.batch} H{small.channels}: both as predicted, to the byte; y within {bound:.2g} of float64"
    )


def _plot_convolution(batch: int, channels: int, path: Path, theme: Any) -> None:
    from ioattn.io.plot import Line, lines

    each = [Convolution(batch, channels, 2**i) for i in range(8, 16)]
    at = [float(it.length) for it in each]
    curves = [
        Line(at, [unfused_bytes(it).total / 2**20 for it in each], "a kernel per step"),
        Line(at, [fused(it).total / 2**20 for it in each], "fused"),
        Line(at, [it.compulsory / 2**20 for it in each], "u, k and y once", dashed=True),
    ]
    title = f"FFT convolution, B{batch} H{channels}, FP16"
    lines(title, "sequence length", "bytes moved, MiB", curves, path, theme, log="xy")
