"""Generates tokens with a paged key/value cache; a pass without a cache over all of them must predict each one again.

python examples/generate.py [tokens]
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import ioattn

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY, PAGE = 2, 4, 2, 16, 1000, 16
Cache = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """Attention and a perceptron. `cache` is keys, values, how many rows each sequence has, and where its pages are."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM)
        self.mlp = nn.Sequential(nn.Linear(HEADS * DIM, 128), nn.GELU(), nn.Linear(128, HEADS * DIM))

    def forward(self, x: Tensor, cache: Cache | None, seen: Tensor, table: Tensor) -> Tensor:
        heads = self.qkv(nn.functional.layer_norm(x, x.shape[-1:])).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        slopes = 0.5 ** torch.arange(1.0, HEADS + 1)
        if cache is None:
            out = ioattn.attention(q, k, v, causal=True, alibi_slopes=slopes)
        else:
            where = {"cache_seqlens": seen, "block_table": table, "k_new": k, "v_new": v}
            out = ioattn.attention_decode(q, *cache, **where, alibi_slopes=slopes)
        x = x + out.transpose(1, 2).flatten(2)
        return x + self.mlp(nn.functional.layer_norm(x, x.shape[-1:]))


@torch.no_grad()
def generate(prompt: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` tokens behind the prompt, `(B, tokens)`, each the likeliest; and the same as a model without cache has it."""
    torch.manual_seed(0)
    embedding, layers, head = nn.Embedding(VOCABULARY, HEADS * DIM), [Layer() for _ in range(LAYERS)]
    head = nn.Linear(HEADS * DIM, VOCABULARY)
    batch, columns = prompt.shape[0], -(-(prompt.shape[1] + count) // PAGE)
    table = torch.randperm(batch * columns, dtype=torch.int32).view(batch, columns)
    caches = [torch.empty(2, batch * columns, KV_HEADS, PAGE, DIM).unbind() for _ in layers]
    seen, tokens, fresh = torch.zeros(batch, dtype=torch.int32), prompt, prompt

    def likeliest(ids: Tensor, caches: list[Cache] | list[None]) -> Tensor:
        x = embedding(ids)
        for layer, cache in zip(layers, caches, strict=True):
            x = layer(x, cache, seen, table)
        return head(x).argmax(-1)

    for _ in range(count):
        fresh, seen = likeliest(fresh, caches)[:, -1:], seen + fresh.shape[1]
        tokens = torch.cat([tokens, fresh], 1)
    return tokens[:, -count:], likeliest(tokens[:, :-1], [None] * LAYERS)[:, -count:]


if __name__ == "__main__":
    cached, uncached = generate(torch.arange(6).view(2, 3), int(sys.argv[1]) if len(sys.argv) > 1 else 512)
    print(cached[0].tolist(), "the same" if torch.equal(cached, uncached) else "different", sep="\n")
