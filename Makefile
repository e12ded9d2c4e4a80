# Each target sets up its own environment, .venv, the first time and again when pyproject.toml or constraints.txt change.
PYTHON ?= python3

ready := .venv/ready
run := .venv/bin

OLDEST_TRITON := 3.6.0
NEWEST_TRITON := 3.9.0
compiled := tests/test_triton_compile.py tests/test_gluon_compile.py tests/test_gluon_backward_compile.py \
    tests/test_decode_compile.py tests/test_triton_shortcuts.py
gluon := test_gluon_order or test_gluon_walks or test_gluon_halves or test_gluon_passes or test_gluon_one_code
interpreted := triton-cpu or test_triton_halves or test_interpreter or $(gluon)

.PHONY: demo test test-compiled test-compiled-oldest test-compiled-newest test-interpreted check clean
.DEFAULT_GOAL := demo

demo: $(ready)
	$(run)/ioattn demo

test: $(ready)
	$(run)/pytest

# The kernels of both GPU backends, compiled for GPUs that are not here by the oldest and by the newest Triton: ten minutes
# each on 2 cores, or some of them: make test-compiled ONLY='causal or every_feature'
test-compiled: test-compiled-oldest test-compiled-newest

test-compiled-oldest: .venv-triton-$(OLDEST_TRITON)/ready
	.venv-triton-$(OLDEST_TRITON)/bin/python -m pytest -n auto --dist worksteal -k '$(ONLY)' $(compiled)

test-compiled-newest: .venv-triton-$(NEWEST_TRITON)/ready
	.venv-triton-$(NEWEST_TRITON)/bin/python -m pytest -n auto --dist worksteal -k '$(ONLY)' $(compiled)

# Triton's kernels in its interpreter, on 2 cores in five minutes: tests/interpreter.py makes it faster; and what of
# Gluon's runs as Python. NumPy warns of inf - inf and the like, which is what these kernels are tested with.
test-interpreted: .venv-triton-$(NEWEST_TRITON)/ready
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 .venv-triton-$(NEWEST_TRITON)/bin/python -m pytest -n auto --dist worksteal \
	    -rs -W ignore::RuntimeWarning -k "$(interpreted)"

check: $(ready)
	$(run)/ruff format --check
	$(run)/ruff check
	$(run)/mypy

clean:
	rm -rf .venv .venv-triton-* demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(ready): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ioattn needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(run)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# An environment that has all of .venv's packages, and besides one version of Triton.
.venv-triton-%/ready: $(ready)
	$(PYTHON) -m venv .venv-triton-$*
	.venv-triton-$*/bin/pip install --quiet --disable-pip-version-check --no-deps triton==$*
	cd .venv-triton-$* && packages=$$(echo lib/python3*/site-packages) && \
	    echo "import site; site.addsitedir('$(CURDIR)/.venv/$$packages')" > $$packages/first.pth
	touch $@
