# Each target sets up its own environment, .venv, the first time and again when pyproject.toml or constraints.txt change.
PYTHON ?= python3

ready := .venv/ready
run := .venv/bin

.PHONY: demo test test-triton check clean
.DEFAULT_GOAL := demo

demo: $(ready)
	$(run)/ioattn demo

test: $(ready)
	$(run)/pytest

# Triton's kernels without a GPU: compiled for five architectures, then run in Triton's interpreter.
test-triton: $(ready)
	$(run)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,gpu]'
	$(run)/pytest tests/test_triton_compile.py
	TRITON_INTERPRET=1 $(run)/pytest -k "triton-cpu and not single_tokens and not c5_large"

check: $(ready)
	$(run)/ruff format --check
	$(run)/ruff check
	$(run)/mypy

clean:
	rm -rf .venv demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(ready): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ioattn needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(run)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
