"""a"""
from __future__ import annotations
from typing import NamedTuple
class Tiles(NamedTuple):
    q_tile: int
    k_tile: int
    num_warps: int
    num_stages: int
    precision: str

def choose(problem, direction):
    return Tiles(32, 32, 4, 2, "ieee")
