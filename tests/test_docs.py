"""What the documentation says can be done, done."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import types
from pathlib import Path

import pytest
import torch

import ioattn
from ioattn.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def modules() -> list[types.ModuleType]:
    """Every module of the package that this machine can import."""
    found = [ioattn]
    for info in pkgutil.walk_packages(ioattn.__path__, "ioattn.", onerror=lambda name: None):
        if info.name.endswith("__main__"):
            continue
        try:
            found.append(importlib.import_module(info.name))
        except ImportError as error:
            # An optional package may be absent; a module of our own may not.
            if error.name is None or error.name.startswith("ioattn"):
                raise
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path) -> None:
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


def test_the_readme_has_an_example() -> None:
    assert blocks(ROOT / "README.md", "python")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for line in "".join(blocks(page, "sh")).splitlines():
        words = line.split()
        if words and words[0] in ("make", "ioattn"):
            assert words[1] in (targets if words[0] == "make" else COMMANDS), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.__name__)
def test_docstring_examples(module: types.ModuleType) -> None:
    public = {name: getattr(ioattn, name) for name in ioattn.__all__}
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder().find(module, extraglobs={"torch": torch, **public}):
        result = runner.run(example)
        assert result.failed == 0, example.name


def test_public_operations_have_examples() -> None:
    finder = doctest.DocTestFinder()
    for name in ioattn.__all__:
        value = getattr(ioattn, name)
        if isinstance(value, types.FunctionType):
            assert any(found.examples for found in finder.find(value, name)), name
