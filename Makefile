# Two commands are all a newcomer needs: `make demo` and `make test`. Both set up what they need.
.PHONY: demo test lint unit soak bench clean compiler
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
BENCH := .venv-bench
PIP := -m pip --disable-pip-version-check install --quiet

help:
	@echo 'make demo    tune real kernels, and watch'
	@echo 'make test    everything that CI runs: lint, types, tests (about 5 minutes)'
	@echo 'make soak    the long stress and kill -9 tests'
	@echo 'make bench   the numbers in the README, beside the peers'"'"'; writes bench/results'
	@echo 'make lint    ruff and mypy alone'

# The compiler first: installing builds the accelerator if there is one.
ACCELERATOR := hatch_build.py src/tunebook/_packed.c

$(VENV)/ready: pyproject.toml constraints.txt $(ACCELERATOR) | compiler
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tunebook needs Python 3.11: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) $(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

# The peers live apart: they bring a framework, and tunebook's own tests must pass without one.
$(BENCH)/ready: pyproject.toml bench/requirements.txt $(ACCELERATOR) | compiler
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python $(PIP) --requirement bench/requirements.txt --editable .
	touch $@

compiler:
	@command -v cc > /dev/null || command -v gcc > /dev/null || { \
	  echo 'no C compiler: installing one'; apt-get update -qq && apt-get install -y -qq gcc libc6-dev; }

demo: $(VENV)/ready
	$(RUN) examples/demo.py

test: lint unit

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

unit: $(VENV)/ready
	$(RUN) -m pytest -m 'not slow'

soak: $(VENV)/ready
	$(RUN) -m pytest -m slow --timeout 1800

bench: $(BENCH)/ready
	$(BENCH)/bin/python bench/run_all.py

clean:
	rm -rf $(VENV) $(BENCH) .mypy_cache .pytest_cache .ruff_cache .hypothesis src/tunebook/*.so
