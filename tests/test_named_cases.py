"""The one table of named problems: benchmarks, commands, documents and result files speak of what is in it."""

from __future__ import annotations

import csv
import dataclasses
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer import BadParameter
from typer.testing import CliRunner

from ioattn.bench.goals import CPU_GOALS
from ioattn.bench.run import compare
from ioattn.cases import CASES, DTYPE_NAMES, from_line, inputs_of, problem_of
from ioattn.cli import app, words
from ioattn.masks import Band

ROOT = Path(__file__).parents[1]


def test_goals_are_about_cases_of_the_table():
    assert {goal.case for goal in CPU_GOALS} <= set(CASES)
    assert len({goal.case for goal in CPU_GOALS}) == len(CPU_GOALS)
    for goal in CPU_GOALS:
        assert {key[0] for key in goal.speedups} <= set(goal.dtypes), goal
        assert {key[1] for key in goal.speedups} <= set(goal.directions), goal


def test_documents_and_result_files_name_cases_of_the_table():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        assert set(re.findall(r"--case (\S+)", page.read_text())) <= set(CASES), page
    lines = {
        str(dataclasses.replace(case.problem(dtype), device=torch.device("cpu")))
        for case in CASES.values()
        for dtype in DTYPE_NAMES
    }
    for path in (ROOT / "benchmarks" / "results").glob("*-cpu-*.csv"):
        with path.open(newline="") as file:
            assert {row["case"] for row in csv.DictReader(file)} <= lines, path


@pytest.mark.parametrize("name", CASES)
def test_the_inputs_of_a_case_make_its_problem(name):
    case = CASES[name]
    problem = dataclasses.replace(case.problem("fp32"), batch=1, heads=case.problem().group, kv_heads=1, len_k=64)
    problem = dataclasses.replace(problem, len_q=min(problem.len_q, 64), bias=problem.bias and (1, 1, 64))
    made = inputs_of(dataclasses.replace(problem, mask=problem.mask and (1, 1, 64)))
    assert made["q"].shape == (1, problem.heads, problem.len_q, problem.dim)
    assert made["dout"].shape == (1, problem.heads, problem.len_q, problem.dim_v)
    assert ("bias" in made, "mask" in made) == (case.bias, case.mask)


def test_a_benchmark_runs_a_case_of_the_table():
    tiny = next(goal for goal in CPU_GOALS if goal.case == "tiny")
    (found,) = compare(tiny, "fp32", "eager", 0.001, 1)
    assert [row.case for row in found.rows] == ["B1 H1 N16 D64 fp32 cpu"] * 2
    assert (found.fault, found.goal) == (None, 1.0)
    flops = 4 * 16 * 16 * 64
    assert found.rows[0].rate == pytest.approx(flops / found.rows[0].median_us / 1e3, abs=0.051)


def test_the_table_is_printed():
    shown = CliRunner().invoke(app, ["io", "cases"]).output
    for name in CASES:
        assert re.search(rf"^{name} +B\d", shown, flags=re.MULTILINE)


sides = st.none() | st.integers(0, 12)


@given(
    sizes=st.tuples(st.integers(0, 3), st.just(4), st.integers(0, 20), st.integers(1, 9)),
    dtype=st.sampled_from(list(DTYPE_NAMES)),
    kv_heads=st.sampled_from([None, 1, 2]),
    len_k=st.none() | st.integers(0, 20),
    dim_v=st.none() | st.integers(1, 9),
    causal=st.sampled_from([False, True, "top-left"]),
    window=st.none() | st.tuples(sides, sides),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_one_line_form_comes_back_as_its_problem(sizes, dtype, **options):
    problem = problem_of(sizes, dtype, **options)
    found = from_line(str(problem))
    assert found is not None
    assert str(found) == str(problem)
    bands = [p.band_of(p.len_q, p.len_k) for p in (problem, found)]
    assert bands[0] == bands[1]


@pytest.mark.parametrize("line", ["nonsense", "B1 H0 N8 D4 fp16 cuda", "B1 H1 N8 D4 fp16 cuda softcap=3", ""])
def test_other_lines_are_no_problem_of_the_laboratory(line):
    assert from_line(line) is None


def test_a_case_keeps_its_window_at_any_length():
    case = CASES["window-256"]
    assert case.band == case.problem().band == Band(-256, 256)
    assert dataclasses.replace(case, sizes=(1, 8, 64, 64)).problem().band == Band()
    assert dataclasses.replace(case, sizes=(1, 8, 64, 64)).band == Band(-256, 256)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (words.sizes("B,H,N,D"), "1,2,3"),
        (words.sizes("B,H,N,D"), "1,2,3,-4"),
        (words.sizes("B,H,N,D"), "1,2,3,4.0"),
        (words.sizes("B,H,N,D"), "1,2,3,"),
        (words.sizes("B,H,N"), "1,2,3,4"),
        (words.sizes("B,H,N"), f"1,2,{'9' * 5000}"),
        (words.sizes("B,H,N"), "1,2,\u00b2"),
        (words.window, "3"),
        (words.window, "3,x"),
        (words.window, "-3,0"),
        (words.n_bytes, "K"),
        (words.n_bytes, "1.5K"),
        (words.n_bytes, "100KB"),
        (words.n_bytes, ""),
        (words.one_of(("light", "dark")), "Light"),
        (words.file_to_write(".svg"), "x.png"),
        (words.file_to_write(".svg"), "/nowhere/x.svg"),
    ],
)
def test_words_that_cannot_be_read_are_refused(parse, text):
    with pytest.raises(BadParameter):
        parse(text)
