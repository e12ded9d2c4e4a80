"""A long convolution by FFT: bytes when each step is a kernel, and when the steps are fused on the chip.

    y = iFFT(FFT(u, 2N) * FFT(k, 2N))[:N]

Zero-padding to 2N makes the circular convolution a causal one. Unfused, each FFT and the product is a kernel that reads
its operands from slow memory and writes its result there. Fused (FlashConv: Fu, Dao et al. 2023, "Hungry Hungry
Hippos"), u is read and y written once, and k's spectrum, computed once for all batches, is read. Either way one FFT
is one pass over its data: the chip holds a sequence's spectrum.

`unfused` and `fused` are formulas; `count_unfused` and `count_fused` run over a counting memory and return y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ioattn.io.ledger import Move, Traffic
from ioattn.io.memory import Memory, Slow


@dataclass(frozen=True)
class Convolution:
    """Batch B, channels H, length N; real values of `itemsize` bytes, complex ones of 8 (two fp32)."""

    batch: int
    channels: int
    length: int
    itemsize: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    @property
    def sequence(self) -> int:
        """Bytes of one real sequence of one channel."""
        return self.length * self.itemsize

    @property
    def spectrum(self) -> int:
        """Bytes of the spectrum of one padded real sequence: N + 1 complex numbers."""
        return (self.length + 1) * 8

    @property
    def on_chip(self) -> int:
        """Bytes that the fused kernel holds: the spectrum of u and that of k."""
        return 2 * self.spectrum

    @property
    def compulsory(self) -> int:
        """u and k read, y written."""
        return self.channels * (2 * self.batch + 1) * self.sequence


def unfused(it: Convolution) -> Traffic:
    """One kernel per step, every spectrum in slow memory; each FFT passes over its data once."""
    u, spectra = it.batch * it.channels * it.sequence, it.batch * it.channels * it.spectrum
    k, k_spectra = it.channels * it.sequence, it.channels * it.spectrum
    moves = (
        Move("FFT(k)", "k", k, 0),
        Move("FFT(k)", "k spectrum", 0, k_spectra),
        Move("FFT(u)", "u", u, 0),
        Move("FFT(u)", "u spectrum", 0, spectra),
        Move("product", "u spectrum", spectra, 0),
        Move("product", "k spectrum", it.batch * k_spectra, 0),
        Move("product", "y spectrum", 0, spectra),
        Move("iFFT", "y spectrum", spectra, 0),
        Move("iFFT", "y", 0, u),
    )
    return Traffic(moves, _flops(it), it.on_chip, 2 * spectra + k_spectra)


def fused(it: Convolution) -> Traffic:
    """One kernel per sequence: its spectrum and the product stay on the chip."""
    u, k, k_spectra = it.batch * it.channels * it.sequence, it.channels * it.sequence, it.channels * it.spectrum
    moves = (
        Move("FFT(k)", "k", k, 0),
        Move("FFT(k)", "k spectrum", 0, k_spectra),
        Move("fused", "k spectrum", it.batch * k_spectra, 0),
        Move("fused", "u", u, 0),
        Move("fused", "y", 0, u),
    )
    return Traffic(moves, _flops(it), it.on_chip, k_spectra)


def _flops(it: Convolution) -> int:
    """5 n log2 n per complex FFT of n = 2N, half for real ones, and 6 per complex product."""
    n = 2 * it.length
    per_fft = round(2.5 * n * math.log2(n))
    return it.channels * ((2 * it.batch + 1) * per_fft + it.batch * 6 * (it.length + 1))


def count_fused(u: Tensor, k: Tensor) -> tuple[Tensor, Traffic]:
    """Run the fused form on u `(B, H, N)` and k `(H, N)` over a chip of the predicted size."""
    it = _of(u, k)
    memory = Memory(it.on_chip, torch.float32)
    u_slow, k_slow, y = memory.place("u", u), memory.place("k", k), memory.place("y", torch.empty_like(u))
    k_spectrum = memory.new("k spectrum", it.channels, it.length + 1, dtype=torch.complex64, extra=True)
    _kernel_spectra(memory, it, k_slow, k_spectrum)
    with memory.step("fused"):
        for b in range(it.batch):
            for h in memory.each(range(it.channels)):
                spectrum = memory.load(k_spectrum, h)
                padded = memory.load(u_slow, b, h)
                # The FFT overwrites its input's room.
                memory.free(padded)
                spectrum.mul_(memory.alloc(_rfft(padded)))
                memory.store(y, _irfft(spectrum), b, h)
    return memory.values(y), memory.traffic()


def count_unfused(u: Tensor, k: Tensor) -> tuple[Tensor, Traffic]:
    """Run step by step on u `(B, H, N)` and k `(H, N)` over a chip of the predicted size."""
    it = _of(u, k)
    memory = Memory(it.on_chip, torch.float32)
    u_slow, k_slow, y = memory.place("u", u), memory.place("k", k), memory.place("y", torch.empty_like(u))
    sizes = (it.batch, it.channels, it.length + 1)
    k_spectrum = memory.new("k spectrum", *sizes[1:], dtype=torch.complex64, extra=True)
    u_spectrum = memory.new("u spectrum", *sizes, dtype=torch.complex64, extra=True)
    y_spectrum = memory.new("y spectrum", *sizes, dtype=torch.complex64, extra=True)
    _kernel_spectra(memory, it, k_slow, k_spectrum)
    each = [(b, h) for b in range(it.batch) for h in range(it.channels)]
    with memory.step("FFT(u)"):
        for at in memory.each(each):
            padded = memory.load(u_slow, *at)
            memory.free(padded)
            memory.store(u_spectrum, memory.alloc(_rfft(padded)), *at)
    with memory.step("product"):
        for b, h in memory.each(each):
            product = memory.load(u_spectrum, b, h).mul_(memory.load(k_spectrum, h))
            memory.store(y_spectrum, product, b, h)
    with memory.step("iFFT"):
        for at in memory.each(each):
            memory.store(y, _irfft(memory.load(y_spectrum, *at)), *at)
    return memory.values(y), memory.traffic()


def _kernel_spectra(memory: Memory, it: Convolution, k_slow: Slow, k_spectrum: Slow) -> None:
    with memory.step("FFT(k)"):
        for h in memory.each(range(it.channels)):
            padded = memory.load(k_slow, h)
            memory.free(padded)
            memory.store(k_spectrum, memory.alloc(_rfft(padded)), h)


def _of(u: Tensor, k: Tensor) -> Convolution:
    if u.dim() != 3 or k.shape != u.shape[1:] or u.dtype != k.dtype:
        raise ValueError(
            f"k has shape {tuple(k.shape)}, {k.dtype}; it must be (H, N) of u, {tuple(u.shape)}, {u.dtype}"
        )
    batch, channels, length = u.shape
    return Convolution(batch, channels, length, u.element_size())


def _rfft(x: Tensor) -> Tensor:
    return torch.fft.rfft(x.float(), n=2 * x.shape[-1])


def _irfft(spectrum: Tensor) -> Tensor:
    length = spectrum.shape[-1] - 1
    return torch.fft.irfft(spectrum, n=2 * length)[:length]
