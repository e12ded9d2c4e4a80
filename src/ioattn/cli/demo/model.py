"""A small causal transformer over bytes, and attention the way a textbook writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ioattn

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Causal attention with ALiBi: q, k, v `(B, H, N, D)` and slopes `(H,)` to out `(B, H, N, D)`."""


def standard_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """softmax(scale * Q K^T - slope * |i - j|, masked) V with every N x N matrix in memory."""
    position = torch.arange(q.shape[-2], device=q.device)
    distance = position[:, None] - position
    scores = q @ k.mT * q.shape[-1] ** -0.5 - slopes[:, None, None] * distance.abs()
    return scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v


def io_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """The same function, with no N x N matrix."""
    return ioattn.attention(q, k, v, causal=True, alibi_slopes=slopes)  # type: ignore[return-value]


@dataclass(frozen=True)
class Shape:
    """The size of a model and of its training."""

    layers: int = 2
    heads: int = 4
    width: int = 128
    context: int = 512
    batch: int = 4
    steps: int = 100
    learning_rate: float = 3e-3
    seed: int = 0

    def slopes(self, device: torch.device) -> Tensor:
        """ALiBi's slopes, a geometric sequence that ends at 2^-8: position without a longest context."""
        return 2.0 ** (-8 * torch.arange(1, self.heads + 1, device=device) / self.heads)


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what comes in."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = shape.heads, attend
        self.norm_attention = nn.LayerNorm(shape.width)
        self.to_qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.from_heads = nn.Linear(shape.width, shape.width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x: Tensor, slopes: Tensor) -> Tensor:
        """x `(B, N, width)` after this block; `slopes` are those of the attention."""
        qkv = self.to_qkv(self.norm_attention(x))  # [B, N, 3 * H * D]
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, N, D]
        heads = self.attend(q, k, v, slopes)
        x = x + self.from_heads(heads.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class ByteModel(nn.Module):
    """Predicts each byte of a text from those before it."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(256, shape.width)
        self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(shape.layers))
        self.to_logits = nn.Sequential(nn.LayerNorm(shape.width), nn.Linear(shape.width, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss, in nats per byte, of tokens `(B, N + 1)`: N predictions each."""
        x = self.embed(tokens[:, :-1])
        slopes = self.shape.slopes(tokens.device)
        for block in self.blocks:
            x = block(x, slopes)
        return cross_entropy(self.to_logits(x).flatten(0, 1), tokens[:, 1:].flatten())


def read_text() -> Tensor:
    """The documentation text that ships inside Python, as bytes."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


def train(
    shape: Shape, attend: Attend, text: Tensor, device: torch.device, on_step: Callable[[float], None]
) -> tuple[ByteModel, list[float]]:
    """A model trained on `text` and its loss at each step; the same seed gives the same weights and batches."""
    torch.manual_seed(shape.seed)
    model = ByteModel(shape, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.learning_rate)
    starts = torch.randint(len(text) - shape.context, (shape.steps, shape.batch))
    windows = text.unfold(0, shape.context + 1, 1)
    losses = []
    for step in range(shape.steps):
        loss = model(windows[starts[step]].to(device, torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        on_step(losses[-1])
    return model, losses
