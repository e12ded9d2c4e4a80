"""The command line: why, doctor, and how sub-commands are found."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner, Result

import ioattn
from ioattn import registry
from ioattn.cli import COMMANDS, app

REASON = "it takes only 7 heads, and this is the reason"


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A backend, preferred to all others, that objects to everything and cannot run here."""
    module = types.ModuleType("picky_backend")
    module.name = "picky"
    module.unusable = lambda: None
    module.objections = lambda problem: [REASON]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "MODULES", {"picky": module.__name__, **registry.MODULES})
    yield module
    registry.load.cache_clear()


def test_help_lists_every_command_with_its_summary() -> None:
    shown = run("--help").output
    for name in COMMANDS:
        assert f"\n  {name} " in shown
    assert "Which backend would run" in shown


def test_version() -> None:
    assert run("--version").output == f"ioattn {ioattn.__version__}\n"


def test_unknown_command_names_nothing_else() -> None:
    result = run("wyh")
    assert result.exit_code == 2
    assert "wyh" in result.output


def test_commands_are_imported_when_they_run() -> None:
    program = "import sys, ioattn.cli; print([m for m in sys.modules if m.startswith('ioattn.cli.')])"
    assert python(program) == "[]\n"
    program = (
        "import sys; from typer.testing import CliRunner; from ioattn.cli import app;"
        "CliRunner().invoke(app, ['why', '--shape', '1,1,8,8']);"
        "print('ioattn.cli.why' in sys.modules, 'ioattn.cli.demo' in sys.modules, 'matplotlib' in sys.modules)"
    )
    assert python(program) == "True False False\n"


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("--shape 2,8,32,16", {}),
        (
            "--shape 2,8,32,16 --kv-shape 2,2,48,16 --dim-v 24 --causal --dtype bf16",
            {"kv": (2, 2, 48, 16), "dim_v": 24},
        ),
        ("--shape 2,8,32,16 --top-left --scale 0.5 --softcap 20 --deterministic", {}),
        ("--shape 2,8,32,16 --window 3,none --alibi --sinks", {"per_head": ("alibi_slopes", "sinks")}),
        ("--shape 2,8,32,16 --bias 1,8,1 --mask 2,1,32", {"bias": (1, 8, 1, 32), "mask": (2, 1, 32, 32)}),
    ],
)
def test_why_describes_the_problem_that_tensors_describe(words: str, call: dict) -> None:
    dtype = torch.bfloat16 if "bf16" in words else torch.float32
    q = torch.zeros(2, 8, 32, 16, dtype=dtype)
    k = torch.zeros(call.get("kv", q.shape), dtype=dtype)
    v = torch.zeros(*k.shape[:-1], call.get("dim_v", 16), dtype=dtype)
    options = {
        "causal": "top-left" if "top-left" in words else "--causal" in words,
        "window": (3, None) if "window" in words else None,
        "scale": 0.5 if "scale" in words else None,
        "softcap": 20.0 if "softcap" in words else None,
        "deterministic": "deterministic" in words,
    }
    extras = {name: torch.zeros(8) for name in call.get("per_head", ())}
    extras |= {name: torch.zeros(call[name], dtype=dtype) for name in ("bias", "mask") if name in call}
    if "mask" in extras:
        extras["mask"] = extras["mask"].bool()
    result = run("why", *words.split())
    assert result.exit_code == 0
    assert result.stdout == f"{ioattn.explain(q, k, v, **options, **extras)}\n"


def test_why_of_a_packed_problem() -> None:
    q, k = torch.zeros(64, 4, 16), torch.zeros(20, 2, 16)
    lengths = {"cu_seqlens_q": [0, 32, 64], "cu_seqlens_k": [0, 10, 20]}
    offsets = {name: torch.tensor(values, dtype=torch.int32) for name, values in lengths.items()}
    result = run("why", "--shape", "2,4,32,16", "--kv-shape", "2,2,10,16", "--packed", "--causal")
    assert result.stdout == f"{ioattn.explain(q, k, k, causal=True, **offsets)}\n"


def test_why_needs_no_memory() -> None:
    # 2 PiB of queries and 256 PiB of bias.
    result = run("why", "--shape", "1024,128,33554432,256", "--dtype", "bf16", "--bias", "1,128,33554432")
    assert result.exit_code == 0
    assert "B1024 H128 N33554432 D256 bf16" in result.stdout


def test_why_prints_the_reasons_of_every_backend(picky: types.ModuleType) -> None:
    result = run("why", "--shape", "1,1,8,8")
    assert f"picky   {REASON}" in result.stdout
    assert result.exit_code == 0
    verdict = json.loads(run("why", "--shape", "1,1,8,8", "--json").stdout)
    assert verdict["chosen"] == ioattn.explain(*[torch.zeros(1, 1, 8, 8)] * 3).chosen != "picky"
    assert verdict["verdicts"][0] == {"backend": "picky", "reasons": [REASON]}
    assert [row["backend"] for row in verdict["verdicts"]] == list(registry.names())


def test_why_fails_when_no_backend_would_run_it(picky: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MODULES", {"picky": picky.__name__})
    result = run("why", "--shape", "1,1,8,8")
    assert result.exit_code == 1
    assert REASON in result.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--shape 1,8,4", "'--shape': '1,8,4'; it must be B,H,N,D"),
        ("--shape 1,8,4,x", "'--shape'"),
        ("--shape 1,8,4,16 --dtype fp8", "'fp8'; it must be one of fp16, bf16, fp32, fp64"),
        ("--shape 1,8,4,16 --device abacus", "'abacus'; it must be cpu"),
        ("--shape 1,8,4,16 --window 4", "'--window': '4'; it must be LEFT,RIGHT"),
        ("--shape 1,8,4,16 --softcap -1", "softcap is -1.0; it must be positive"),
        ("--shape 1,8,4,16 --kv-shape 1,3,4,16", "q has 8 heads; it must have a multiple of the 3 heads"),
        ("--shape 1,8,4,16 --bias 3,1,1", "bias has shape (3, 1, 1, 4); it must broadcast"),
        ("--shape 1,1,4294967296,4294967296", "overflow"),
        ("--shape 99999999999999999999999,1,1,1", "Overflow"),
        ("--shape 1,8,4,16 --window 99999999999999999999999,0", "window is (99999999999999999999999, 0); it must be"),
        ("--shape 1,8,4,16 --packed --bias 1,1,1", "bias is given with packed inputs"),
    ],
)
def test_why_rejects_bad_input(words: str, says: str) -> None:
    result = run("why", *words.split())
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_why_says_when_the_device_is_absent() -> None:
    assert "torch sees no cuda:0" in run("why", "--shape", "1,1,8,8", "--device", "cuda").stderr


def test_doctor_reports_versions_machine_and_backends() -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["versions"]["ioattn"] == ioattn.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu"]["torch_threads"] == torch.get_num_threads()
    assert found["cpu"]["cores"] >= 1
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert [row["name"] for row in found["backends"]] == list(registry.names())
    assert {"name": "eager", "unusable": None} in found["backends"]


def test_doctor_says_what_an_unusable_backend_needs(picky: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    picky.unusable = lambda: "it needs abacus; install it with  pip install 'ioattn[abacus]'"
    monkeypatch.setitem(registry.MODULES, "missing", "ioattn_has_no_such_module")
    shown = run("doctor")
    assert shown.exit_code == 0
    assert "picky   no: it needs abacus; install it with  pip install 'ioattn[abacus]'" in shown.stdout
    assert "missing no: it cannot be imported: No module named 'ioattn_has_no_such_module'" in shown.stdout
    assert "eager   usable" in shown.stdout


def test_module_form_of_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ioattn.cli", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"ioattn {ioattn.__version__}\n"
