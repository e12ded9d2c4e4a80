"""`ioattn bench plot` draws what a results file holds, and says so when there is nothing to draw."""

import csv
import re

import pytest
from typer.testing import CliRunner

from ioattn.bench.plot import OURS, against_best, over_length, read
from ioattn.cli import app

matplotlib = pytest.importorskip("matplotlib")

COLUMNS = ("case", "direction", "implementation", "rate", "unit")


def results(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    return path


ROWS = [
    (f"B1 H2 N{n} D{d} bf16 cuda{mask}", "forward", name, 100 * i + n / 100, "TFLOP/s")
    for n in (512, 2048)
    for d in (64, 128)
    for mask in ("", " causal")
    for i, name in enumerate((OURS + "gluon", "cudnn"), 1)
]


def test_ratios_and_rates_are_drawn(tmp_path):
    rates = read(results(tmp_path / "a.csv", ROWS), "forward")
    assert over_length(rates, tmp_path / "rates.svg", "light")
    shown = (tmp_path / "rates.svg").read_text()
    for text in ("ioattn gluon", "cuDNN", "D 64, full", "D 128, causal", "512", "2k", "TFLOP/s"):
        assert text in shown
    assert against_best(rates, tmp_path / "ratios.svg", "dark")
    shown = (tmp_path / "ratios.svg").read_text()
    assert shown.count("cuDNN") == 8
    assert f"{105.12 / 205.12:.2f}" in shown


def test_what_has_one_length_or_no_peer_is_not_drawn(tmp_path):
    rates = read(results(tmp_path / "a.csv", ROWS[:2]), "forward")
    assert not over_length(rates, tmp_path / "a.svg", "light")
    assert not against_best(rates[:1], tmp_path / "a.svg", "light")
    assert not read(tmp_path / "a.csv", "backward")


def test_the_command_names_its_files(tmp_path):
    path = results(tmp_path / "h200-gluon-2026-11-30.csv", ROWS)
    done = CliRunner().invoke(app, ["bench", "plot", str(path), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    names = {p.name for p in (tmp_path / "out").iterdir()}
    kinds = [f"h200-gluon-forward-{kind}-{theme}.svg" for kind in ("rates", "ratios") for theme in ("light", "dark")]
    assert names == set(kinds)
    empty = CliRunner().invoke(app, ["bench", "plot", str(results(path, ROWS[:1])), "--output", str(tmp_path)])
    assert empty.exit_code == 2
    assert re.search("nothing\\W+to\\W+draw", empty.output)
