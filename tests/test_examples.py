"""The examples run, and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


def test_a_generation_with_a_cache_gives_the_tokens_of_the_model_without() -> None:
    generate = loaded(next(path for path in EXAMPLES if path.stem == "generate"))
    cached, uncached = generate.generate(torch.arange(6).view(2, 3), 512)
    assert cached.shape == (2, 512)
    # The pages were filled with NaN, and the tokens are no trivial sequence.
    assert len(cached[0].unique()) > 100
    assert torch.equal(cached, uncached)
