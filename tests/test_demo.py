"""The demo: its model, its measurements, its check of sampled rows, its picture and the whole of it, small."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner, Result

import ioattn
from ioattn.cli import app, demo
from ioattn.cli.demo import memory, picture
from ioattn.cli.demo.memory import Measurement, Task, matrices_bytes, measure
from ioattn.cli.demo.model import Shape, io_attention, read_text, standard_attention, train

SMALL = Shape(layers=2, heads=2, width=16, context=48, batch=2, steps=6)
CPU = torch.device("cpu")


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["demo", "--quick", *words])


def test_text_is_long_english() -> None:
    text = bytes(read_text().tolist())
    assert len(text) > 200_000
    assert b"Assert statements are a convenient way to insert debugging" in text


@pytest.mark.usefixtures("float64_by_default")
def test_standard_attention_is_what_torch_computes() -> None:
    q, k, v = torch.randn(3, 2, 4, 33, 8).unbind()
    slopes = Shape(heads=4).slopes(CPU)
    position = torch.arange(33)
    penalty = -slopes[:, None, None] * (position[:, None] - position).abs()
    bias = penalty.masked_fill(position[:, None] < position, -torch.inf)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=bias)
    ours = standard_attention(q, k, v, slopes)
    assert (ours - expected).abs().max() <= 8 * torch.finfo(torch.float64).eps * v.abs().max()


@pytest.mark.usefixtures("float64_by_default")
def test_training_takes_the_same_path_on_both() -> None:
    """In float64 the two runs may part by rounding only: far less than a float32 could show."""
    losses = {}
    for attend in (standard_attention, io_attention):
        seen: list[float] = []
        _, losses[attend] = train(SMALL, attend, read_text(), CPU, seen.append)
        assert seen == losses[attend]
    assert len(losses[io_attention]) == SMALL.steps
    parted = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    assert parted < torch.finfo(torch.float32).eps * min(losses[standard_attention])
    assert losses[io_attention][-1] < losses[io_attention][0]


def test_training_repeats_itself() -> None:
    runs = [train(SMALL, standard_attention, read_text(), CPU, lambda _: None)[1] for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    other = Shape(**{**vars(SMALL), "seed": 1})
    assert train(other, standard_attention, read_text(), CPU, lambda _: None)[1][0] != runs[0][0]


def test_standard_attention_needs_its_matrices_and_ioattn_does_not() -> None:
    standard = measure(Task("standard", 2048, "cpu"))
    ours = measure(Task("ioattn", 4096, "cpu", checked_rows=8))
    assert standard.extra_bytes >= matrices_bytes(2048)
    assert standard.backend is None
    # Output, LSE and gradients alone are four times 1 MiB.
    assert 4 * 2**20 < ours.extra_bytes < matrices_bytes(4096) // 2
    assert ours.backend == ioattn.explain(*torch.zeros(3, 1, 1, 8, 64), causal=True).chosen
    for error, allowed in ours.errors.values():
        assert 0 < error <= allowed


def test_a_failing_measurement_shows_why() -> None:
    with pytest.raises(RuntimeError, match="abacus"):
        measure(Task("abacus", 16, "cpu"))


@pytest.mark.parametrize("at", [0, 1])
def test_check_rows_sees_one_wrong_row(at: int) -> None:
    torch.manual_seed(0)
    inputs = tuple(torch.randn(1, 1, 64, 16, requires_grad=i < 3) for i in range(4))
    slopes = torch.tensor([0.1])
    out = standard_attention(*inputs[:3], slopes)
    out.backward(inputs[3])
    results = [out.detach(), inputs[0].grad.clone()]
    assert all(error <= allowed for error, allowed in memory.check_rows(inputs, slopes, tuple(results), 64).values())
    results[at][..., 40, 3] += 1e-4
    error, allowed = memory.check_rows(inputs, slopes, tuple(results), 64)[("out", "dq")[at]]
    assert error > allowed


def test_standard_is_not_tried_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**30)
    assert memory.standard_fits(2048, CPU)
    assert not memory.standard_fits(8192, CPU)


def test_the_whole_demo(tmp_path: Path) -> None:
    result = run("--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    shape = demo.QUICK_PLAN.shape
    q = torch.zeros(shape.batch, shape.heads, shape.context, shape.width // shape.heads)
    chosen = ioattn.explain(q, q, q, causal=True, alibi_slopes=torch.zeros(shape.heads)).chosen
    assert f"attention ran on backend {chosen}" in shown
    assert f"largest difference of the loss over all {shape.steps} steps" in shown
    for tokens in demo.QUICK_PLAN.tokens:
        assert f" {tokens:,} {memory.human(matrices_bytes(tokens))} " in shown
    assert "out largest error" in shown
    assert "dq largest error" in shown
    path = tmp_path / "ioattn-demo.png"
    assert str(path) in shown.replace(" ", "") or str(path) in result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_demo_fails_when_a_row_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Measurement(2**20, 0.1, "eager", {"out": (1e-3, 1e-6)})
    monkeypatch.setattr(memory, "measure", lambda task: wrong)
    result = run("--out", str(tmp_path))
    assert result.exit_code == 1
    assert "wrong at" in result.output


def test_the_demo_runs_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    monkeypatch.setattr(memory, "measure", lambda task: Measurement(2**20, 0.1, "eager", {"out": (0.0, 1e-6)}))
    result = run("--out", str(tmp_path))
    assert result.exit_code == 0
    assert "pip install 'ioattn[viz]'" in result.output
    assert not list(tmp_path.iterdir())


def test_identical_curves_are_both_visible(tmp_path: Path) -> None:
    import matplotlib.colors
    import matplotlib.image

    losses = [5.0 / (1 + step) for step in range(50)]
    extra = {"standard": {1024: 2**25}, "ioattn": {1024: 2**20, 2048: 2**21}}
    path = picture.draw(tmp_path / "p.png", {"standard": losses, "ioattn": losses}, extra, None)
    pixels = torch.from_numpy(matplotlib.image.imread(path)[..., :3].copy())
    curves = pixels[: pixels.shape[0] // 2, : pixels.shape[1] // 3]  # without the legend and the right half
    for colour in (picture.STANDARD, picture.OURS):
        close = (curves - torch.tensor(matplotlib.colors.to_rgb(colour))).abs().amax(-1) < 0.02
        assert close.sum() > 200


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        result = run("--out", str(place))
        assert result.exit_code == 2
        assert "it must be a folder that can be made" in result.stderr
        assert "ioattn demo on" not in result.stdout
