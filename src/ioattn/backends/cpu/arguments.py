"""The block of numbers that a worker reads: one 64-bit slot each, filled by the host, loaded by name in the IR."""

from __future__ import annotations

import struct
from typing import Any

from ioattn.backends.cpu.ir import F32, I32, I64, PTR, Function, Type, Value
from ioattn.backends.cpu.softmax import UNBOUNDED

TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "bias", "mask", "dbias", "tree")
"""Tensors with four strides: batch, head, row and column, in bytes."""

STRIDES = ("batch", "head", "row", "col")

SCRATCH = (
    "q_rows", "q_tile", "q_pairs", "k_rows", "k_pairs", "v_rows", "v_pairs", "scores", "weights", "acc", "state",
    "row_sum", "starts", "found", "out_rows", "bias_rows", "bias_tile", "mask_rows", "mask_tile",
    "dout_rows", "dout_tile", "dout_pairs", "dout_fp32", "out_fp32", "dscores", "dscore_rows", "dscore_pairs",
    "dq_acc", "dk_acc", "dv_acc", "dbias_tile",
)  # fmt: skip
"""Regions of one thread's part of the workspace; their slots hold offsets in bytes."""

POINTERS = (
    *TENSORS,
    "lse",
    "dlse",
    "sinks",
    "slopes",
    "dsinks",
    "starts_q",
    "starts_k",
    "lengths",
    "table",
    "workspace",
    "partial",
)
FLOATS = ("query_factor", "factor", "softcap", "scale", "key_gradient_factor", "one")
NUMBERS = (
    "workspace_step",
    "batches", "heads", "group", "len_q", "len_k",
    "dim", "dim_v", "dim_padded", "dim_v_padded", "dim_words", "dim_v_words",
    "lo", "hi", "shift", "bottom_right",
    "lse_batch", "lse_head", "dlse_batch", "dlse_head", "dlse_row",
    "blocks", "block_rows", "block_keys", "chunks", "chunk_keys", "batch_members", "head_members",
    "partial_batch", "partial_head", "partial_chunk",
    "appended", "page", "table_row",
)  # fmt: skip

FIELDS = (
    "task", "last_task", "thread",
    *POINTERS,
    *(f"{tensor}_{stride}" for tensor in TENSORS for stride in STRIDES),
    *NUMBERS,
    *FLOATS,
    *(f"at_{region}" for region in SCRATCH),
)  # fmt: skip
SLOTS = {name: slot for slot, name in enumerate(FIELDS)}


def float_slot(x: float) -> int:
    """What a slot holds for a float: its fp32 bits."""
    return struct.unpack("<i", struct.pack("<f", x))[0]


class Arguments:
    """Loads slots inside a worker: `args.dim` is an integer, `args.q` a pointer, `args.scale` a float."""

    def __init__(self, f: Function):
        self.f, self.block = f, f.args.block

    def __getattr__(self, name: str) -> Value:
        kind: Type = PTR if name in POINTERS else F32 if name in FLOATS else I64
        return self.slot(name).load(kind)

    def slot(self, name: str) -> Value:
        """The address of a slot."""
        return self.block + 8 * SLOTS[name]

    def given(self, pointer: str) -> Value:
        """Whether an optional tensor is there."""
        return self.slot(pointer).load(I64).differs(0)

    def row(self, tensor: str, batch: Value, head: Value, row: Value | int) -> Value:
        """The address of a row's first element."""
        base = getattr(self, tensor)
        by_batch, by_head, by_row = (getattr(self, f"{tensor}_{stride}") for stride in STRIDES[:3])
        return base + by_batch * batch + by_head * head + by_row * row

    def scratch(self) -> Scratch:
        """One thread's part of the workspace; to be asked once per worker."""
        thread = self.f.fetch_add(self.slot("thread"), 1)
        return Scratch(self, self.workspace + thread * self.workspace_step)


class Scratch:
    """The regions of one thread's workspace, by name."""

    def __init__(self, args: Arguments, base: Value):
        self._args, self._base = args, args.f.variable(base)

    def __getattr__(self, name: str) -> Value:
        return self._base.value + getattr(self._args, f"at_{name}")


class Sequence:
    """One sequence of the batch: where its rows start, how many there are, and its band in one frame.

    Dense inputs are sequences that start at row 0 of their own batch entry; packed ones share batch entry 0. Over a
    cache the number of keys is read from its lengths.
    """

    def __init__(self, args: Arguments, index: Value):
        f = args.f
        self.args = args
        batch = f.variable(index)
        bounds = {side: (f.variable(0), f.variable(getattr(args, f"len_{side}"))) for side in "qk"}
        with f.when(args.given("starts_q")):
            batch.value = 0
            for side, (start, length) in bounds.items():
                starts = getattr(args, f"starts_{side}") + index * 4
                start.value = starts.load(I32).to(I64)
                length.value = (starts + 4).load(I32).to(I64) - start.value
        with f.when(args.given("lengths")):
            bounds["k"][1].value = (args.lengths + index * 4).load(I32).to(I64) + args.appended
        self.batch = batch.value
        self.start_q, self.len_q = (x.value for x in bounds["q"])
        self.start_k, self.len_k = (x.value for x in bounds["k"])
        shift = args.shift + (self.len_k - self.len_q) * args.bottom_right
        self.lo, self.hi = (clamped(f, x + shift, -UNBOUNDED, UNBOUNDED) for x in (args.lo, args.hi))

    def query(self, tensor: str, head: Value, row: Value | int) -> Value:
        """The address of query `row` in a tensor of queries."""
        return self.args.row(tensor, self.batch, head, self.start_q + row)

    def key(self, tensor: str, head: Value, row: Value | int) -> Value:
        """The address of key `row` in a tensor of keys."""
        return self.args.row(tensor, self.batch, head, self.start_k + row)

    def lse(self, head: Value, row: Value | int) -> Value:
        """The address of the lse of query `row`."""
        args = self.args
        return args.lse + (args.lse_batch * self.batch + args.lse_head * head + (self.start_q + row) * 4)

    def key_range(self, first: Value, end: Value) -> tuple[Value, Value]:
        """The keys that at least one query of `[first, end)` sees: `Band.key_range` in run-time numbers."""
        f = self.args.f
        return clamped(f, first + self.lo, 0, self.len_k), clamped(f, end + self.hi, 0, self.len_k)

    def full_key_range(self, first: Value, end: Value) -> tuple[Value, Value]:
        """The keys that every query of `[first, end)` sees: `Band.full_key_range` in run-time numbers."""
        f = self.args.f
        return clamped(f, end - 1 + self.lo, 0, self.len_k), clamped(f, first + self.hi + 1, 0, self.len_k)

    def query_range(self, first: Value, end: Value) -> tuple[Value, Value]:
        """The queries that see at least one key of `[first, end)`: `Band.query_range` in run-time numbers."""
        f = self.args.f
        return clamped(f, first - self.hi, 0, self.len_q), clamped(f, end - self.lo, 0, self.len_q)


def clamped(f: Function, x: Value, low: Value | int, high: Value | int) -> Value:
    """`x` moved into `[low, high]`."""
    return f.smallest(f.largest(x, low), high)


def fill(values: dict[str, Any]) -> list[int]:
    """The slots of an argument block; what is not in `values` is zero, a missing tensor or an unused number."""
    return [float_slot(values[name]) if name in FLOATS and name in values else values.get(name, 0) for name in FIELDS]
