"""The page in a headless browser: its counters are the predicted numbers, by mouse and by keyboard, wide and narrow."""

from __future__ import annotations

import re

import pytest
from chromium import BINARY, Page

from ioattn.cases import problem_of
from ioattn.io.page import write_page
from ioattn.io.results import measured_points
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import predict

needs_browser = pytest.mark.skipif(BINARY is None, reason="no Chromium on the PATH; Debian: apt-get install chromium")

NAUGHTY = "</script><!--<script>&<svg onload=document.title=1>"

RESULT = f"""\
date,commit,machine,torch,triton,case,direction,implementation,median_us,spread,rate,unit,error
2026-11-29,abc,h200,2.11,3.6,B1 H16 N8192 D128 bf16 cuda causal,forward,ioattn:gluon,100,0.01,595,TFLOP/s,1e-3
2026-11-29,abc,h200,2.11,3.6,B1 H16 N8192 D128 bf16 cuda causal softcap=5,forward,flex,100,0.01,300,TFLOP/s,1e-3
2026-11-29,abc,h200,2.11,3.6,B1 H32/8 N1x131072 D128 bf16 cuda causal,decode,fa2,100,0.01,3.43,TB/s,1e-3
2026-11-29,abc,NVIDIA GB200,2.11,3.6,B1 H16 N8192 D128 bf16 cuda,forward,fa4,100,0.01,1300,TFLOP/s,1e-3
2026-11-29,abc,NVIDIA H200,2.11,3.6,B1 H16 N4096 D64 fp32 cuda,forward,{NAUGHTY},100,0.01,30,TFLOP/s,1e-3
"""

COUNTED = f"""\
{RESULT.splitlines()[0]},caches,dram_read,dram_written
2026-11-30,abc,h200,2.11,3.6,B1 H1 N4096 D64 fp16 cuda,forward,naive,83.7,,51.3,TFLOP/s,,flushed,69264640,22454016
2026-11-30,abc,h200,2.11,3.6,B1 H1 N4096 D64 fp16 cuda,forward,sdpa,12.3,,349,TFLOP/s,,kept,512,19200
"""


PAGE_SCHEDULES = ["naive", "fused-softmax", "fa1", "fa2", "split-kv", "fa2 backward", "two-pass backward"]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (folder / "h200-all-2026-11-29.csv").write_text(RESULT)
    (folder / "h200-io-2026-11-30.csv").write_text(COUNTED)
    assert write_page(folder / "page.html", folder) == 5
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser(page_file, tmp_path_factory):
    with Page(page_file.as_uri(), tmp_path_factory.mktemp("profile")) as page:
        yield page
        assert page.errors == []


def counters(page: Page) -> dict[str, list[int]]:
    rows = page.value(
        "[...document.querySelectorAll('#counters tbody tr')].map(r => "
        "[r.dataset.tensor, ...[...r.cells].slice(1).map(c => Number(c.dataset.bytes))])"
    )
    return {name: numbers for name, *numbers in rows}


@needs_browser
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", PAGE_SCHEDULES)
def test_a_click_moves_the_counters_to_the_predicted_numbers(browser, schedule, causal):
    for selector, value in (("#schedule", schedule), ("#n", 1024), ("#d", 32), ("#e", 4), ("#bq", 128), ("#bk", 64)):
        browser.select(selector, value)
    if browser.value("document.getElementById('causal').checked") != causal:
        browser.click("#causal")
    assert sum(read + written for read, written, _ in counters(browser).values()) == 0
    browser.click("#end")
    name, _, backward = schedule.partition(" ")
    problem = problem_of((1, 1, 1024, 32), "fp32", causal=causal)
    predicted = predict(problem, name, "backward" if backward else "forward", Blocks(128, 64))
    wanted = {}
    for move in predicted.moves:
        read, written, _ = wanted.get(move.tensor, (0, 0, 0))
        read, written = read + move.read, written + move.written
        wanted[move.tensor] = [read, written, read + written]
    assert counters(browser) == wanted
    assert browser.value("Number(document.getElementById('chip-used').dataset.peak)") == predicted.on_chip
    assert browser.value("state.run.chip.used") == 0
    assert browser.value("state.flops") == predicted.flops


@needs_browser
def test_the_keyboard_steps(browser):
    browser.select("#schedule", "fa2")
    browser.value("document.activeElement.blur()")
    progress = "document.getElementById('progress').textContent"
    for key, step in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", None), ("Home", 0)):
        browser.press(key)
        shown, total = map(int, re.findall(r"\d+", browser.value(progress)))
        assert shown == (total if step is None else step)
    browser.press(" ")
    assert browser.value("document.getElementById('play').textContent") == "Pause"
    browser.press(" ")
    assert browser.value("document.getElementById('play').textContent") == "Play"
    browser.value("document.querySelector('summary').focus()")
    browser.press(" ")
    assert browser.value("document.querySelector('details').open")
    assert browser.value("document.getElementById('play').textContent") == "Play"


@needs_browser
@pytest.mark.parametrize(("update", "right"), [("fa2", True), ("fa1", True), ("as-printed", False)])
def test_the_small_example_shows_which_update_is_right(browser, update, right):
    browser.select("#update", update)
    browser.click("#online-reset")
    for _ in range(4):
        browser.click("#online-step")
    verdict = browser.value("document.getElementById('online-verdict').textContent")
    assert verdict.endswith("the same" if right else "WRONG")


@needs_browser
def test_measured_points_are_on_the_roofline(browser):
    browser.select("#e", 2)
    browser.select("#machine", "h200")
    titles = browser.value("[...document.querySelectorAll('#roofline title')].map(t => t.textContent)")
    assert titles[0] == "ioattn:gluon: B1 H16 N8192 D128 bf16 causal, forward, 595 TFLOP/s"
    assert titles[1].startswith("fa2: B1 H32/8 N1x131072 D128 bf16 causal, decode, ")
    assert titles[2] == "naive: B1 H1 N4096 D64 fp16, forward, 51.3 TFLOP/s"
    assert len(titles) == 3  # nothing of another machine, of another width, or with caches kept
    listed = browser.value("[...document.querySelectorAll('#measured tbody tr')].map(r => r.cells[4].textContent)")
    assert float(listed[2]) == pytest.approx(4 * 4096 * 64 * 4096 / (69264640 + 22454016), rel=0.01)
    assert "1 with bytes counted by the GPU" in browser.value("document.getElementById('roofline-text').textContent")


@needs_browser
def test_names_from_result_files_stay_text(browser):
    browser.select("#machine", "h200")
    browser.select("#e", 4)
    titles = browser.value("[...document.querySelectorAll('#roofline title')].map(t => t.textContent)")
    assert titles == [f"{NAUGHTY}: B1 H16 N4096 D64 fp32, forward, 30 TFLOP/s"]
    assert browser.value("document.querySelectorAll('svg').length") == 1
    assert browser.value("document.title") == "Attention's bytes, tile by tile"
    browser.select("#e", 2)
    browser.select("#machine", "b200")
    assert browser.value("document.querySelectorAll('#roofline title').length") == 0


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_in_both_colour_schemes(page_file, tmp_path, dark):
    with Page(page_file.as_uri(), tmp_path, width=390, height=844, dark=dark) as page:
        assert page.value("document.documentElement.scrollWidth") == 390
        background = page.value("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)")
        page.click("#step")
        assert page.value("document.getElementById('progress').textContent").startswith("step 1 of")
        assert page.errors == []


def test_the_page_needs_no_network(page_file):
    text = page_file.read_text()
    assert not re.findall(r"(?:src|href)=|@import|url\(|fetch\(|https?://", text)


def test_measured_points_follow_the_result_files(page_file):
    prefill, decode, *_ = measured_points(page_file.parent)
    assert (prefill.implementation, prefill.flops_per_s) == ("ioattn:gluon", 595e12)
    # K and V at 3.43 TB/s: 4 FLOPs per 2 bytes for each of the 4 queries of a group, so 4 FLOPs per byte.
    assert decode.flops_per_s == pytest.approx(4 * 3.43e12)


def test_a_file_that_is_no_result_file_is_named(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv lacks the columns case, direction"):
        measured_points(tmp_path)
