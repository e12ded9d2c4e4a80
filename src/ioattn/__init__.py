"""Exact attention that moves as few bytes as the hardware allows, and shows you the bytes."""

from ioattn.api import attention, attention_decode, attention_varlen, explain
from ioattn.merge import merge
from ioattn.registry import UnsupportedProblemError

__version__ = "0.1.0"
__all__ = ["UnsupportedProblemError", "attention", "attention_decode", "attention_varlen", "explain", "merge"]
