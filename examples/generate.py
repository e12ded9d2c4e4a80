"""Generates with a paged key/value cache; a pass without a cache over all tokens must predict each one again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ioattn

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY, PAGE = 2, 4, 2, 16, 1000, 16


class Layer(nn.Module):
    """Attention and a perceptron; keys and values go to the pages of a cache if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM)
        self.mlp = nn.Sequential(nn.Linear(HEADS * DIM, 128), nn.GELU(), nn.Linear(128, HEADS * DIM))

    def forward(self, x: Tensor, cache: tuple[Tensor, ...] | None, seen: Tensor, table: Tensor) -> Tensor:
        """The next hidden states; `seen` is how many rows of each sequence the cache has."""
        heads = self.qkv(nn.functional.layer_norm(x, x.shape[-1:])).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        if cache is None:
            out = ioattn.attention(q, k, v, causal=True, alibi_slopes=slopes)
        else:
            new = {"k_new": k, "v_new": v, "alibi_slopes": slopes}
            out = ioattn.attention_decode(q, *cache, cache_seqlens=seen, block_table=table, **new)
        x = x + out.transpose(1, 2).flatten(2)
        return x + self.mlp(nn.functional.layer_norm(x, x.shape[-1:]))


@torch.no_grad()
def generate(prompt: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` tokens behind the prompt, `(B, tokens)`, each the likeliest; and what the model says without a cache."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCABULARY, HEADS * DIM), nn.Linear(HEADS * DIM, VOCABULARY)
    layers = [Layer() for _ in range(LAYERS)]
    batch, columns = prompt.shape[0], -(-(prompt.shape[1] + count) // PAGE)
    table = torch.randperm(batch * columns, dtype=torch.int32).view(batch, columns)
    caches = [torch.empty(2, batch * columns, KV_HEADS, PAGE, DIM).unbind() for _ in layers]
    seen, tokens, fresh = torch.zeros(batch, dtype=torch.int32), prompt, prompt

    def likeliest(ids: Tensor, caches: list) -> Tensor:
        x = embedding(ids)
        for layer, cache in zip(layers, caches, strict=True):
            x = layer(x, cache, seen, table)
        return head(x).argmax(-1)

    for _ in range(count):
        fresh, seen = likeliest(fresh, caches)[:, -1:], seen + fresh.shape[1]
        tokens = torch.cat([tokens, fresh], 1)
    return tokens[:, -count:], likeliest(tokens[:, :-1], [None] * LAYERS)[:, -count:]


if __name__ == "__main__":
    cached, uncached = generate(torch.arange(6).view(2, 3), 512)
    print(cached[0].tolist(), "the same" if torch.equal(cached, uncached) else "different", sep="\n")
