"""Decoding steps: predicted == counted to the byte over contiguous and paged caches, and the result is attention."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ioattn.cli.io import app
from ioattn.io import decode
from ioattn.io.decode import Decode
from ioattn.io.memory import CapacityError
from ioattn.io.schedules.decode import checks, count, inputs_of
from ioattn.io.tiles import Blocks


@st.composite
def steps(draw) -> Decode:
    kv_heads, appended = draw(st.integers(1, 2)), draw(st.integers(0, 3))
    return Decode(
        lengths=tuple(draw(st.lists(st.integers(appended, 60), min_size=1, max_size=3))),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        dim=draw(st.integers(4, 9)),
        dtype=draw(st.sampled_from(["fp16", "bf16", "fp32"])),
        len_q=draw(st.integers(1, 5)),
        left=draw(st.none() | st.integers(0, 30)),
        page=draw(st.none() | st.integers(1, 20)),
        appended=appended,
        blocks=Blocks(draw(st.integers(2, 9)), draw(st.integers(2, 17)), draw(st.integers(1, 5))),
    )


@given(it=steps())
@example(Decode((40, 0, 17), 8, 2, 8, page=16, blocks=Blocks(64, 16, 4)))
@example(Decode((40, 33), 8, 2, 8, page=16, appended=1, blocks=Blocks(64, 16, 1)))
@example(Decode((50,), 4, 1, 8, left=5, len_q=3, page=4, blocks=Blocks(64, 16, 3)))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_predicted_is_counted(it):
    predicted, inputs = decode.predict(it), inputs_of(it)
    # The chip is as large as the prediction says: a step that needed one byte more would be refused.
    counted = count(it, inputs, predicted.on_chip)
    assert {(m.step, m.tensor): (m.read, m.written) for m in counted.traffic.moves} == {
        (m.step, m.tensor): (m.read, m.written) for m in predicted.moves
    }
    assert (counted.traffic.flops, counted.traffic.extra) == (predicted.flops, predicted.extra)
    assert predicted.total >= it.compulsory


@given(it=steps())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_result_is_attention(it):
    inputs = inputs_of(it)
    found = checks(it, inputs, count(it, inputs).results)
    assert len(found) == len(it.lengths)
    assert all(checked.holds for checked in found), found


def test_keys_and_values_are_read_once_for_a_group():
    lengths = (4096, 1000, 1)
    for page in (None, 16, 64, 256):
        for splits in (1, 2, 16):
            it = Decode(lengths, 32, 8, 128, page=page, blocks=Blocks(64, 128, splits))
            found = decode.predict(it)
            kv = sum(lengths) * 8 * 128 * 2
            assert (found.of("K"), found.of("V")) == (kv, kv)
            rows, sums = 32, 4
            pieces = {1: 0, 2: 2 + 2 + 1, 16: 16 + 8 + 1}[splits]
            assert found.of("partial O") == 2 * pieces * rows * 128 * sums
            assert found.of("partial LSE") == 2 * pieces * rows * sums
            # Each tile of 128 keys reads the entries of the pages that it touches, once per key/value head.
            entries = {None: 0, 16: 256 + 63 + 1, 64: 64 + 16 + 1, 256: 32 + 8 + 1}[page]
            assert found.of("table") == 8 * entries * 4


def test_the_intensity_is_the_size_of_the_group():
    found = decode.predict(Decode((131072,), 32, 8, 128))
    assert found.intensity == pytest.approx(4, rel=0.001)


def test_without_a_band_the_chip_is_as_full_as_predicted():
    for page, splits in ((None, 1), (16, 4)):
        it = Decode((256,), 8, 2, 16, page=page, blocks=Blocks(64, 64, splits))
        needed = decode.predict(it).on_chip
        assert count(it, inputs_of(it), needed).traffic.on_chip == needed
        with pytest.raises(CapacityError):
            count(it, inputs_of(it), needed - 1)


def test_appended_rows_are_in_the_cache_before_they_are_attended_to():
    it = Decode((20, 33), 4, 2, 8, page=16, appended=2, dtype="fp32")
    found = count(it, inputs_of(it)).results
    assert torch.isfinite(found["O"]).all()
    assert torch.isfinite(found["LSE"]).all()


def test_the_command_counts_what_it_predicts():
    words = [
        "decode",
        "--lengths",
        "40,7",
        "--batch",
        "2",
        "--dim",
        "16",
        "--page",
        "16",
        "--append",
        "1",
        "--splits",
        "2",
    ]
    shown = CliRunner().invoke(app, [*words, "--count"])
    assert shown.exit_code == 0, shown.output
    assert "counted as predicted, to the byte" in shown.output
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert found["bytes"] == sum(m["read"] + m["written"] for m in found["moves"])
    assert found["kv_bytes"] == 2 * (40 + 7) * 8 * 16 * 2 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page": 0}, "page is 0; it must be at least 1"),
        ({"lengths": ()}, "there must be some"),
        ({"lengths": (-1,)}, "lengths are"),
        ({"lengths": (5, 1), "appended": 2}, "each with its 2 new keys"),
        ({"len_q": 0}, "len_q is 0"),
        ({"heads": 3}, "q has 3 heads; it must have a multiple of the 2 heads"),
        ({"dtype": "fp8"}, "dtype is 'fp8'"),
    ],
)
def test_errors_name_the_cause(changes, message):
    with pytest.raises(ValueError, match=message):
        Decode(**({"lengths": (8,), "heads": 4, "kv_heads": 2, "dim": 8} | changes))
