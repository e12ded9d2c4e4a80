"""The laboratory's commands: what they print, draw and refuse; the documents' commands run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ioattn.cases import CASES
from ioattn.cli.io import app
from ioattn.io import decode
from ioattn.io.decode import Decode
from ioattn.io.tensors import read_tensor
from ioattn.io.tiles import Blocks
from ioattn.io.traffic import predict


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_a_window_wider_than_the_problem_hides_keys_at_other_lengths():
    # At 128 keys a window of 1000 hides nothing, and the problem says so; at 131072 it hides nearly everything.
    shape = ("--shape", "1,1,128,64", "--window", "1000,0", "--schedule", "fa2", "--json")
    found = {p["seqlen"]: p["bytes"] for p in json.loads(run("predict", *shape, "--sweep", "seqlen"))}
    assert found[131072] / found[65536] == pytest.approx(2, rel=0.01)


def test_top_left_is_another_problem_where_queries_and_keys_differ_in_number():
    words = ("predict", "--shape", "1,1,64,16", "--len-k", "256", "--block-k", "16", "--schedule", "fa2", "--json")
    (left,), (right,), (full,) = (json.loads(run(*words, *more)) for more in (["--top-left"], ["--causal"], []))
    assert left["problem"].endswith("causal top-left")
    assert left["bytes"] < right["bytes"] < full["bytes"] + 1
    assert "predicted == counted" in run("count", "--shape", "1,1,64,16", "--len-k", "100", "--top-left")


def test_json_holds_no_infinities():
    (found,) = json.loads(
        run("predict", "--shape", "0,1,8,64", "--schedule", "fa2", "--json"), parse_constant=pytest.fail
    )
    assert found["intensity"] is None


def test_a_named_case_is_asked_about_in_another_dtype():
    assert run("predict", "--case", "train-8k", "--dtype", "fp16").startswith("B1 H16 N8192 D128 fp16 causal")


def test_measured_points_are_listed_and_belong_to_their_machine(tmp_path):
    columns = "date,commit,machine,torch,triton,case,direction,implementation,median_us,spread,rate,unit,error\n"
    row = "d,c,{},t,t,B1 H1 N{} D64 fp16 cuda,forward,{},1,0,{},TFLOP/s,1\n"
    rows = [row.format("NVIDIA GB200", 64, "other", 9), row.format("NVIDIA H200", 128, "ours", 7)]
    (tmp_path / "x.csv").write_text(columns + "".join(rows))
    listed = run("predict", "--machine", "h200", "--results", str(tmp_path))
    assert re.search(r"B1 H1 N128 D64 fp16 +forward +ours +7 TFLOP/s", listed)
    assert "other" not in listed
    assert "no measured points of b200" in run("predict", "--machine", "b200", "--results", str(tmp_path))


def test_tensors_are_read_from_both_kinds_of_file(tmp_path):
    np = pytest.importorskip("numpy")
    q = torch.randn(1, 2, 5, 4)
    np.save(tmp_path / "q.npy", q.numpy())
    assert torch.equal(read_tensor(tmp_path / "q.npy", "q"), q)
    data = q.bfloat16().view(torch.int16).numpy().tobytes()
    header = json.dumps({"q": {"dtype": "BF16", "shape": [1, 2, 5, 4], "data_offsets": [0, len(data)]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert torch.equal(read_tensor(path, "q"), q.bfloat16())
    with pytest.raises(ValueError, match="holds q; it must hold k"):
        read_tensor(path, "k")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="q would end at"):
        read_tensor(path, "q")
    with pytest.raises(ValueError, match="is no tensor file"):
        read_tensor(tmp_path / "q.pt", "q")


def test_files_that_cannot_be_read_are_named(tmp_path):
    np = pytest.importorskip("numpy")
    good = tmp_path / "good.npy"
    np.save(good, np.ones((1, 1, 4, 4), dtype=np.float16))
    whole = good.read_bytes()
    files = {
        "cut.npy": (whole[:-5], "is no .npy file"),
        "empty.npy": (b"", "is no .npy file"),
        "text.npy": (b"hello", "is no .npy file"),
        "short.safetensors": (b"123", "its header cannot be read"),
        "list.safetensors": ((2).to_bytes(8, "little") + b"[]", "holds nothing; it must hold q"),
        "keys.safetensors": ((8).to_bytes(8, "little") + b'{"q":{}}', "its header cannot be read"),
    }
    for name, (data, message) in files.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=re.escape(message)):
            read_tensor(tmp_path / name, "q")
    for dtype in ("int64", "complex64", "uint16"):
        np.save(tmp_path / "x.npy", np.zeros(3, dtype=dtype))
        with pytest.raises(ValueError, match=f"holds {dtype}; it must be float16, float32 or float64"):
            read_tensor(tmp_path / "x.npy", "q")
    with pytest.raises(ValueError, match="is not there; q must be"):
        read_tensor(tmp_path / "absent.npy", "q")
    header = json.dumps({"q": {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0000")
    with pytest.raises(ValueError, match="4 bytes, which do not fit each other"):
        read_tensor(tmp_path / "x.safetensors", "q")


def test_other_byte_orders_empty_tensors_and_nans_are_counted(tmp_path):
    np = pytest.importorskip("numpy")
    np.save(tmp_path / "big.npy", np.arange(16, dtype=">f4").reshape(1, 1, 4, 4))
    np.save(tmp_path / "none.npy", np.zeros((1, 1, 0, 4), dtype=np.float32))
    np.save(tmp_path / "nan.npy", np.full((1, 1, 4, 4), np.nan, dtype=np.float32))
    for q in ("big.npy", "none.npy", "nan.npy"):
        files = ("--q", str(tmp_path / q), "--k", str(tmp_path / "big.npy"), "--v", str(tmp_path / "big.npy"))
        assert "predicted == counted, to the byte" in run("count", *files)
        assert "--dtype is given with tensors" in run("count", *files, "--dtype", "fp16", code=2)


def test_count_on_files(tmp_path):
    np = pytest.importorskip("numpy")
    for name, heads, rows in (("q", 4, 30), ("k", 2, 40), ("v", 2, 40)):
        np.save(tmp_path / f"{name}.npy", torch.randn(1, heads, rows, 8).half().numpy())
    files = [word for name in "qkv" for word in (f"--{name}", str(tmp_path / f"{name}.npy"))]
    (found,) = json.loads(run("count", *files, "--schedule", "fa1", "--causal", "--json"))
    assert found["same"] is True
    assert found["title"].startswith("B1 H4/2 N30x40 D8 fp16 causal")
    assert "--dout is missing" in run("count", *files, "--backward", code=2)
    assert "--k, --v missing; give --q, --k and --v together" in run("count", *files[:2], code=2)


def test_count_exits_with_1_where_a_result_is_wrong():
    shape = ("--shape", "1,1,64,16", "--block-k", "16")
    assert "BEYOND its bound" in run("count", *shape, "--schedule", "as-printed", code=1)
    assert "predicted == counted, to the byte" in run("count", *shape, "--schedule", "fa2", "--backward")
    assert "use smaller blocks" in run("count", *shape, "--sram", "1K", code=2)


def test_predict_as_json_and_with_every_option():
    (found,) = json.loads(run("predict", "--schedule", "naive", "--json"))
    assert (found["bytes"], found["binds"], found["extra_bytes"]) == (203423744, "bandwidth", 2**26)
    assert sum(move["read"] + move["written"] for move in found["moves"]) == found["bytes"]
    shown = run(
        "predict", "--case", "train-8k", "--backward", "--best-blocks", "--machine", "h200", "--measured-us", "900"
    )
    assert "reached" in shown
    assert "compulsory" in run("predict", "--sweep", "sram", "--schedule", "fa2")
    assert len(json.loads(run("predict", "--sweep", "block", "--schedule", "fa1", "--json"))) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("predict", "--schedule", "fa9"), "schedule is 'fa9'"),
        (("predict", "--case", "nope"), "case is 'nope'"),
        (("predict", "--case", "chapter", "--causal"), "--causal given without --shape; a named case has its own"),
        (("predict", "--shape", "1,2,3"), "it must be B,H,N,D"),
        (("predict", "--sweep", "colour"), "sweep is 'colour'"),
        (("predict", "--plot", "x.pdf"), "it must end in .png or .svg"),
        (("predict", "--results", "/nowhere"), "it must be a folder"),
        (("predict", "--shape", "1,3,8,4", "--kv-heads", "2"), "q has 3 heads"),
        (("compare", "fa1", "naive"), "it must be one of fa1, fa2"),
        (("paged", "--mean", "0"), "mean is 0"),
        (("page", "--out", "/nowhere/x.html"), "its folder must exist"),
        (("measure", "--implementation", "fa9"), "implementation is 'fa9'"),
        (("predict", "--case", "chapter", "--kv-heads", "0"), "--kv-heads given without --shape"),
        (("predict", "--shape", "1,1,8,8", "--len-k", "-5"), "len_k is -5; it must not be negative"),
        (("predict", "--shape", f"{10**12},{10**12},8,8"), "fewer than 2**63 bytes"),
        (("predict", "--measured-us", "0"), "measured-us is 0; it must be positive"),
        (("predict", "--measured-us", "nan"), "measured-us is nan"),
        (("predict", "--sweep", "block", "--best-blocks"), "--best-blocks is given with --sweep; it would do nothing"),
        (("predict", "--json", "--results", "."), "--results is given with --json"),
        (("predict", "--theme", "blue"), "'blue'; it must be one of light, dark"),
        (("predict", "--plot", "/nowhere/x.svg"), "its folder must exist"),
        (("predict", "--shape", "1,1,0,8", "--plot", "x.svg"), "a plot needs one whose schedules move something"),
        (("predict", "--shape", "0,1,8,8", "--sweep", "heads", "--plot", "x.svg"), "no schedule moves anything"),
        (("predict", "--machine", "v100", "--case", "train-8k"), "machine v100 has no bf16 peak"),
        (("predict", "--case", "bias"), "problem has a bias"),
        (("count", "--shape", "1,1,8,8", "--dtype", "fp64"), "dtype is fp64"),
        (("count", "--case", "prefill-32k", "--schedule", "naive"), "use smaller sizes"),
        (("count", "--shape", "1,1,64,8", "--sram", "0"), "use smaller blocks"),
        (("count", "--dout", "x.npy"), "--dout is given without --backward"),
        (("page", "--out", "x.txt"), "it must end in .html"),
        (("page", "--results", "/nowhere"), "it must be a folder of result files"),
        (("paged", "--mean", "100", "--longest", "10"), "mean is 100; it must be at most the longest length, 10"),
        (("speculative", "--weights", "-1"), "weights is -1; it must be finite and not negative"),
        (("speculative", "--weights", "0", "--cache", "0"), "the target's step reads nothing"),
        (("flashconv", "--count", "--length", str(10**10)), "use smaller sizes"),
        (("decode", "--lengths", "5,x"), "it must be integers separated by commas"),
        (("decode", "--lengths", "1", "--append", "2"), "each with its 2 new keys"),
        (("decode", "--page", "0"), "page is 0; it must be at least 1"),
        (("decode", "--batch", "0"), "batch is 0"),
        (("decode", "--count", "--batch", "1000"), "use smaller sizes"),
    ],
)
def test_errors_name_what_is_wrong(arguments, message):
    assert message in " ".join(run(*arguments, code=2).split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_measuring_without_a_gpu_says_so():
    assert "cannot measure: torch sees no CUDA GPU here" in run("measure", code=1)


PLOTS = [
    ("predict",),
    ("decode", "--theme", "dark"),
    ("predict", "--backward", "--theme", "dark"),
    ("predict", "--sweep", "seqlen"),
    ("paged",),
    ("speculative", "--theme", "dark"),
    ("flashconv", "--length", "64", "--channels", "2", "--count"),
]


@pytest.mark.parametrize("arguments", PLOTS, ids=" ".join)
def test_plots_are_drawn(arguments, tmp_path):
    pytest.importorskip("matplotlib")
    run(*arguments, "--plot", str(tmp_path / "x.svg"))
    text = (tmp_path / "x.svg").read_text()
    assert text.count("<svg") == 1
    assert len(re.findall(r"<text[^>]*>[^<]*[a-z]{4}", text)) >= 3  # a title, an axis, a legend


DOCUMENT = Path(__file__).parents[1] / "docs" / "io.md"


COMMANDS = re.findall(r"^ioattn io (.*)$", DOCUMENT.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("command", sorted({c for c in COMMANDS if c != "measure" and "--case chapter" not in c}))
def test_the_documents_commands_run(command, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(DOCUMENT.parents[1] / "benchmarks")
    run(*command.split(), code=1 if "as-printed" in command else 0)
    for name in re.findall(r"--plot (\S+)", command):
        assert (tmp_path / name).stat().st_size > 1000
        for theme in ("light", "dark"):
            assert (DOCUMENT.parent / "figures" / name.replace(".", f"-{theme}.")).exists()


def test_one_png(tmp_path):
    pytest.importorskip("matplotlib")
    run("predict", "--plot", str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


TABLES = [("chapter",), ("compare",), ("compare", "--backward"), ("machines",), ("decode", "--splits", "2")]


@pytest.mark.parametrize("arguments", TABLES)
def test_tables_are_printed_both_ways(arguments):
    assert run(*arguments).count("\n") > 8
    json.loads(run(*arguments, "--json"))


def test_importing_the_laboratory_loads_no_heavy_package():
    heavy = "('numpy', 'matplotlib', 'triton', 'llvmlite')"
    code = (
        f"import sys; before = set(sys.modules); import torch; base = set(sys.modules); import ioattn.cli.io; "
        f"print([m for m in {heavy} if m in sys.modules and m not in base])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("schedule", "direction", "printed"),
    [
        ("naive", "forward", "194 MiB"),
        ("fused-softmax", "forward", "130 MiB"),
        ("fa2", "forward", "65 MiB"),
        ("naive", "backward", "292 MiB"),
        ("fused-softmax", "backward", "228 MiB"),
        ("fa1", "backward", "163.5 MiB"),
        ("fa2", "backward", "199.5 MiB"),
        ("two-pass", "backward", "134.5 MiB"),
    ],
)
def test_the_documents_totals_are_ours(schedule, direction, printed):
    assert printed in DOCUMENT.read_text()
    total = predict(CASES["chapter"].problem(), schedule, direction).total / 2**20
    assert f"{total:.4g} MiB" == printed or f"{total:.0f} MiB" == printed


def test_the_documents_shares_are_ours():
    text = " ".join(DOCUMENT.read_text().split())
    fa2 = predict(CASES["chapter"].problem(), "fa2", "backward")
    assert "Two thirds of it are the fp32 sum of dQ" in text
    assert fa2.of("dQ sum") / fa2.total == pytest.approx(2 / 3, abs=0.02)
    one, cut = (decode.predict(Decode((131072,), 32, 8, 128, blocks=Blocks(64, 128, n))) for n in (1, 16))
    paged = decode.predict(Decode((131072,), 32, 8, 128, page=16))
    short = decode.predict(Decode((1024,), 32, 8, 128, blocks=Blocks(64, 128, 8)))
    kv = one.of("K", "V")
    shares = {
        "read again, are {} of them": ((cut.total - kv) / kv, 2),
        "tokens add {}.": (paged.of("table") / kv, 2),
        "tile of 128 makes {}.": ((short.total - short.of("K", "V")) / short.of("K", "V"), 0),
    }
    for words, (share, digits) in shares.items():
        assert words.format(f"{share:.{digits}%}") in text
