"""`ioattn doctor`: what is installed, what the machine has, and which backends can work here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

import ioattn
from ioattn import registry

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

PACKAGES = ("torch", "triton", "llvmlite", "numpy", "matplotlib")
FEATURES = ("f16c", "fma3", "avx2", "avx512", "amx", "neon", "asimd", "sve", "sme", "bf16", "i8mm")
"""Beginnings of the names of CPU features that matter to attention."""


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Versions, CPU, GPUs, and each backend: usable, or why not and what to install."""
    findings = examine()
    if as_json:
        typer.echo(json.dumps(findings, indent=2))
    else:
        _show(findings, Console(highlight=False, soft_wrap=True))


def examine() -> dict[str, Any]:
    """Everything that `ioattn doctor` prints, as JSON values."""
    return {
        "versions": {"ioattn": ioattn.__version__, "python": platform.python_version(), **_package_versions()},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "backends": [{"name": name, "unusable": registry.unusable(name)} for name in registry.names()],
    }


def _package_versions() -> dict[str, str | None]:
    installed: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _cpu() -> dict[str, Any]:
    # Older torch cannot list the features; the level of its own kernels is then all that is known.
    list_features = getattr(torch.cpu, "get_capabilities", dict)
    known: dict[str, Any] = list_features()
    return {
        "name": known.get("cpu_name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
        "features": sorted(name for name, there in known.items() if there is True and name.startswith(FEATURES)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
    }


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }


def _show(findings: dict[str, Any], console: Console) -> None:
    versions = (f"{name} {version or '(not installed)'}" for name, version in findings["versions"].items())
    cpu = findings["cpu"]
    console.print("[bold]versions[/]  " + ", ".join(versions))
    console.print(f"[bold]platform[/]  {findings['platform']}")
    console.print(
        f"[bold]cpu[/]       {cpu['name']}, {cpu['cores']} cores, {_gib(cpu['memory_bytes'])}, torch uses "
        f"{cpu['torch_threads']} threads and its {cpu['torch_kernels']} kernels"
    )
    console.print(f"          features: {' '.join(cpu['features']) or 'not known to this torch'}")
    for gpu in findings["gpus"]:
        console.print(
            f"[bold]gpu[/]       {gpu['name']}, compute capability {gpu['capability']}, "
            f"{gpu['multiprocessors']} multiprocessors, {_gib(gpu['memory_bytes'])}"
        )
    if not findings["gpus"]:
        console.print("[bold]gpu[/]       none that torch can use")
    console.print("[bold]backends[/]  in order of preference")
    for backend in findings["backends"]:
        state = "[green]usable[/]" if backend["unusable"] is None else f"[red]no[/]: {escape(backend['unusable'])}"
        console.print(f"  {backend['name']:<7} {state}")


def _gib(size: int | None) -> str:
    return "unknown memory" if size is None else f"{size / 2**30:.1f} GiB"
