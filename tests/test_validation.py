"""Bad input: the right exception, in one line, that names the argument, what it is and what it must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ioattn

Q, K, V = (2, 4, 9, 16), (2, 2, 30, 16), (2, 2, 30, 24)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


DENSE: dict[str, tuple[dict[str, Any], type[Exception], str, str]] = {
    "q rank": ({"q": zeros(4, 9, 16)}, ValueError, "q", "3 dimensions; it must have 4"),
    "k rank": ({"k": zeros(2, 30, 16)}, ValueError, "k", "3 dimensions; it must have 4"),
    "v rank": ({"v": zeros(1, 2, 2, 30, 24)}, ValueError, "v", "5 dimensions; it must have 4"),
    "q list": ({"q": [1.0]}, TypeError, "q", "a list; it must be a torch.Tensor"),
    "k none": ({"k": None}, TypeError, "k", "a NoneType; it must be a torch.Tensor"),
    "integers": ({"q": zeros(*Q, dtype=torch.int64)}, TypeError, "q", "torch.int64; it must be float16"),
    "complex": ({"q": zeros(*Q, dtype=torch.complex64)}, TypeError, "q", "torch.complex64; it must be float16"),
    "k dtype": ({"k": zeros(*K, dtype=torch.bfloat16)}, TypeError, "k", "torch.bfloat16; it must have q's dtype"),
    "v dtype": ({"v": zeros(*V, dtype=torch.float64)}, TypeError, "v", "torch.float64; it must have q's dtype"),
    "k device": ({"k": torch.zeros(K, device="meta")}, ValueError, "k", "meta; it must be on q's device, cpu"),
    "k batch": ({"k": zeros(3, 2, 30, 16), "v": zeros(3, 2, 30, 24)}, ValueError, "k", "batch size 3; it must have"),
    "k dim": ({"k": zeros(2, 2, 30, 8)}, ValueError, "k", "head dimension 8; it must have q's, 16"),
    "v rows": ({"v": zeros(2, 2, 31, 24)}, ValueError, "v", "its rows must be k's"),
    "v heads": ({"v": zeros(2, 4, 30, 24)}, ValueError, "v", "its heads must be k's"),
    "v batch": ({"v": zeros(1, 2, 30, 24)}, ValueError, "v", "its batch size must be k's"),
    "heads": (
        {"k": zeros(2, 3, 30, 16), "v": zeros(2, 3, 30, 24)},
        ValueError,
        "q",
        "4 heads; it must have",
    ),
    "no heads": ({"q": zeros(2, 0, 9, 16)}, ValueError, "q", "must have at least one head"),
    "no columns": ({"v": zeros(2, 2, 30, 0)}, ValueError, "v", "at least one head and one column"),
    "causal word": ({"causal": "left"}, ValueError, "causal", "'left'; it must be True, False, 'bottom-right'"),
    "causal number": ({"causal": 1}, TypeError, "causal", "1; it must be True, False"),
    "causal none": ({"causal": None}, TypeError, "causal", "None; it must be True, False"),
    "window number": ({"window": 5}, TypeError, "window", "5; it must be (left, right)"),
    "window of three": ({"window": (1, 2, 3)}, TypeError, "window", "(1, 2, 3); it must be (left, right)"),
    "window float": ({"window": (1.0, 2)}, TypeError, "window", "(1.0, 2); it must be (left, right)"),
    "window bool": ({"window": (True, 2)}, TypeError, "window", "(True, 2); it must be (left, right)"),
    "window negative": (
        {"window": (-1, 0)},
        ValueError,
        "window",
        "(-1, 0); it must be (left, right), each an int",
    ),
    "window right negative": ({"window": (None, -3)}, ValueError, "window", "each an int >= 0"),
    "scale nan": ({"scale": float("nan")}, ValueError, "scale", "nan; it must be finite"),
    "scale infinite": ({"scale": float("-inf")}, ValueError, "scale", "-inf; it must be finite"),
    "scale word": ({"scale": "1"}, TypeError, "scale", "a str; it must be a number or None"),
    "scale tensor": ({"scale": zeros(1)}, TypeError, "scale", "a Tensor; it must be a number or None"),
    "softcap zero": ({"softcap": 0.0}, ValueError, "softcap", "0.0; it must be positive, or None"),
    "softcap negative": ({"softcap": -30}, ValueError, "softcap", "-30; it must be positive"),
    "softcap nan": ({"softcap": float("nan")}, ValueError, "softcap", "nan; it must be finite"),
    "softcap bool": ({"softcap": True}, TypeError, "softcap", "a bool; it must be a number or None"),
    "deterministic": ({"deterministic": 1}, TypeError, "deterministic", "1; it must be True or False"),
    "slopes shape": ({"alibi_slopes": zeros(2)}, ValueError, "alibi_slopes", "(2,); it must be (H,) = (4,)"),
    "slopes rank": ({"alibi_slopes": zeros(2, 4)}, ValueError, "alibi_slopes", "(2, 4); it must be (H,) = (4,)"),
    "slopes integer": ({"alibi_slopes": zeros(4).int()}, TypeError, "alibi_slopes", "torch.int32; it must be a float"),
    "slopes list": ({"alibi_slopes": [1, 2, 3, 4]}, TypeError, "alibi_slopes", "a list; it must be a torch.Tensor"),
    "slopes gradient": ({"alibi_slopes": zeros(4).requires_grad_()}, ValueError, "alibi_slopes", "must be detached"),
    "sinks shape": ({"sinks": zeros(5)}, ValueError, "sinks", "(5,); it must be (H,) = (4,)"),
    "sinks device": ({"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks", "meta; it must be on q's device"),
    "bias keys": ({"bias": zeros(9, 29)}, ValueError, "bias", "it must broadcast to (B, H, Nq, Nk) = (2, 4, 9, 30)"),
    "bias one key": ({"bias": zeros(9, 1)}, ValueError, "bias", "must broadcast"),
    "bias heads": ({"bias": zeros(2, 2, 9, 30)}, ValueError, "bias", "must broadcast"),
    "bias queries": ({"bias": zeros(8, 30)}, ValueError, "bias", "must broadcast"),
    "bias batch": ({"bias": zeros(3, 1, 1, 30)}, ValueError, "bias", "must broadcast"),
    "bias rank 5": ({"bias": zeros(1, 1, 1, 1, 30)}, ValueError, "bias", "5 dimensions; it must broadcast"),
    "bias rank 0": ({"bias": zeros()}, ValueError, "bias", "0 dimensions; it must broadcast"),
    "bias bool": ({"bias": zeros(9, 30).bool()}, TypeError, "bias", "torch.bool; it must be a tensor of float32"),
    "bias half": ({"bias": zeros(9, 30).half()}, TypeError, "bias", "torch.float16; it must be a tensor of float32"),
    "bias device": ({"bias": torch.zeros(9, 30, device="meta")}, ValueError, "bias", "must be on q's device"),
    "mask float": ({"mask": zeros(9, 30)}, TypeError, "mask", "torch.float32; it must be a tensor of bool"),
    "mask keys": ({"mask": zeros(9, 31).bool()}, ValueError, "mask", "must broadcast"),
    "mask list": ({"mask": [[True]]}, TypeError, "mask", "a list; it must be a torch.Tensor"),
    "q sparse": ({"q": zeros(*Q).to_sparse()}, TypeError, "q", "a sparse_coo tensor; it must be a strided one"),
    "bias sparse": ({"bias": zeros(9, 30).to_sparse()}, TypeError, "bias", "a sparse_coo tensor; it must be"),
    "window huge": ({"window": (10**30, 0)}, ValueError, "window", "it must be (left, right), each an int"),
    "scale huge": ({"scale": 10**400}, ValueError, "scale", "too large; it must be finite"),
    "backend list": ({"backend": ["eager"]}, ValueError, "backend", "['eager']; it must be one of"),
    "backend": ({"backend": "cuda"}, ValueError, "backend", "'cuda'; it must be one of"),
}

PACKED: dict[str, tuple[dict[str, Any], type[Exception], str, str]] = {
    "dense q": ({"q": zeros(*Q)}, ValueError, "q", "4 dimensions; it must have 3"),
    "v rows": ({"v": zeros(31, 2, 24)}, ValueError, "v", "its rows must be k's"),
    "no offsets": ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k", "None; it must be an int32 tensor"),
    "list": ({"cu_seqlens_q": [0, 4, 9]}, TypeError, "cu_seqlens_q", "a list; it must be"),
    "int64": ({"cu_seqlens_q": int32(0, 4, 9).long()}, TypeError, "cu_seqlens_q", "torch.int64; it must be an int32"),
    "rank": ({"cu_seqlens_q": int32(0, 4, 9)[None]}, ValueError, "cu_seqlens_q", "(1, 3); it must be (B + 1,)"),
    "no entries": ({"cu_seqlens_q": int32()}, ValueError, "cu_seqlens_q", "(0,); it must be (B + 1,)"),
    "counts": ({"cu_seqlens_k": int32(0, 30)}, ValueError, "cu_seqlens_k", "2 entries; it must have as many"),
    "start": ({"cu_seqlens_q": int32(1, 4, 9)}, ValueError, "cu_seqlens_q[0]", "1; offsets must start at 0"),
    "falling": ({"cu_seqlens_k": int32(0, 31, 30)}, ValueError, "cu_seqlens_k", "from 31 to 30; it must not decrease"),
    "past the end": ({"cu_seqlens_k": int32(0, 9, 31)}, ValueError, "cu_seqlens_k", "31; it must not pass the 30 rows"),
    "longest q": ({"max_seqlen_q": 4}, ValueError, "max_seqlen_q", "4; the longest sequence has 5 rows"),
    "longest k": ({"max_seqlen_k": 20}, ValueError, "max_seqlen_k", "20; the longest sequence has 21 rows"),
    "longest negative": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q", "-1; it must be at least 0"),
    "longest huge": ({"max_seqlen_k": 10**30}, ValueError, "max_seqlen_k", "it must be at least 0 and less than 2**31"),
    "longest float": ({"max_seqlen_k": 21.0}, TypeError, "max_seqlen_k", "21.0; it must be an int or None"),
    "offsets device": (
        {"cu_seqlens_q": torch.zeros(3, device="meta", dtype=torch.int32)},
        ValueError,
        "cu_seqlens_q",
        "on q's device",
    ),
    "window": ({"window": (-1, -1)}, ValueError, "window", "each an int >= 0"),
    "sinks": ({"sinks": zeros(3)}, ValueError, "sinks", "(3,); it must be (H,) = (4,)"),
}


def dense_call(**changes: Any) -> Any:
    arguments = {"q": zeros(*Q), "k": zeros(*K), "v": zeros(*V), **changes}
    return ioattn.attention(**arguments)


def packed_call(**changes: Any) -> Any:
    arguments = {
        "q": zeros(9, 4, 16),
        "k": zeros(30, 2, 16),
        "v": zeros(30, 2, 24),
        "cu_seqlens_q": int32(0, 4, 9),
        "cu_seqlens_k": int32(0, 9, 30),
        **changes,
    }
    return ioattn.attention_varlen(**arguments)


def assert_refused(call: Callable[..., Any], row: tuple[dict[str, Any], type[Exception], str, str]) -> None:
    changes, kind, name, part = row
    with pytest.raises(kind) as raised:
        call(**changes)
    message = str(raised.value)
    assert raised.type is kind
    assert "\n" not in message
    assert message.startswith(f"{name} ")
    assert part in message
    assert "must" in message or "longest" in message


@pytest.mark.parametrize("case", DENSE)
def test_dense(case: str) -> None:
    assert_refused(dense_call, DENSE[case])


@pytest.mark.parametrize("case", PACKED)
def test_packed(case: str) -> None:
    assert_refused(packed_call, PACKED[case])


def test_the_unchanged_calls_are_valid() -> None:
    assert dense_call().shape == (2, 4, 9, 24)
    assert packed_call().shape == (9, 4, 24)


@pytest.mark.parametrize("case", DENSE)
def test_dense_under_compile(case: str) -> None:
    """Compiling must not lose a check; what the compiler wraps around the message is its own."""
    changes, _, _, part = DENSE[case]
    torch._dynamo.reset()
    with pytest.raises(Exception) as raised:  # noqa: PT011
        torch.compile(dense_call, backend="eager")(**changes)
    assert part in str(raised.value)


def test_options_are_keyword_only() -> None:
    q = zeros(*Q)
    with pytest.raises(TypeError, match="positional"):
        ioattn.attention(q, q, q, True)  # type: ignore[misc]


def test_bias_does_not_occur_with_packed_inputs() -> None:
    with pytest.raises(TypeError, match="bias"):
        packed_call(bias=zeros(9, 30))


def test_refusal_comes_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("worked on bad input")

    from ioattn.backends import eager

    monkeypatch.setattr(eager, "forward", fail)
    assert_refused(dense_call, DENSE["bias keys"])
    assert_refused(packed_call, PACKED["falling"])


def test_nested_tensors_are_refused() -> None:
    jagged = torch.nested.nested_tensor([zeros(5, 4, 16), zeros(3, 4, 16)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(TypeError, match="q is a nested tensor; it must be a strided one"):
        ioattn.attention(jagged, jagged, jagged)


def test_negative_longest_length_of_no_sequences() -> None:
    with pytest.raises(ValueError, match="max_seqlen_q is -1; it must be"):
        packed_call(cu_seqlens_q=int32(0), cu_seqlens_k=int32(0), max_seqlen_q=-1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_autocast_makes_no_number_of_what_is_none(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=f"q is {dtype}; it must be float16"):
        dense_call(q=zeros(*Q, dtype=dtype))


def test_explain_checks_offsets_and_takes_lengths() -> None:
    q = zeros(9, 4, 16)
    with pytest.raises(ValueError, match="cu_seqlens_q falls from 5 to 3"):
        ioattn.explain(q, q, q, cu_seqlens_q=int32(0, 5, 3), cu_seqlens_k=int32(0, 5, 9))
    given = ioattn.explain(q, q, q, cu_seqlens_q=int32(0, 9), cu_seqlens_k=int32(0, 9), max_seqlen_q=100)
    assert given.problem.len_q == 100
