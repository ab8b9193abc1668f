# `make demo` and `make test` do everything on a fresh machine with Python >= 3.10, make and a C++
# compiler: the first call makes .venv, later ones start at once.
#
#   PYTHON=python3.12     the interpreter that .venv is made from; its torch >= 2.8 is used if it has one
#   PY=/path/to/python    run with this interpreter as it is: nothing is installed
#   PYTEST_ARGS="-k store"   JOBS=8   (0: without pytest-xdist)

PYTHON ?= python3
VENV := .venv
PYTEST_ARGS ?=
BENCH_ARGS ?=
RELEASE_ARGS ?=
VERSIONS_ARGS ?=
# One more than two cores: tests of ranks wait for a quarter of their time. A file's tests stay with
# one worker, which sets up their fixtures, until another worker is idle.
JOBS ?= 3
CXX_FILES = $(shell find src tests \( -name '*.h' -o -name '*.cuh' -o -name '*.cc' -o -name '*.cu' \) \
              -not -path '*/_prebuilt/*')

ifdef PY
  ready =
  export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
else
  PY := $(VENV)/bin/python
  ready = $(VENV)/.ready-$(1)
endif

.PHONY: demo test test-all test-versions lint format bench plots bench-ci sanitize docs wheel kernels-wheel \
        release-check resolve-check clean
.NOTPARALLEL:

demo: $(call ready,cuda)
	$(PY) -W "ignore:Failed to initialize NumPy" examples/demo.py

pytest = $(PY) -m pytest $(if $(filter-out 0,$(JOBS)),-n $(JOBS) --dist worksteal)

test: $(call ready,test)
	$(pytest) -m "not slow" $(PYTEST_ARGS)

# Also the sweeps and mutants of kernels and threads, wheels, all archs, examples: half an hour.
test-all: $(call ready,test)
	$(pytest) $(PYTEST_ARGS)

# One wheel under several versions of Python, torch and tvm-ffi: downloads up to 3 GB for each
# version of torch, where no CPU builds are to be had. VERSIONS_ARGS="--python --torch 2.8.0": those only.
test-versions: $(call ready,test)
	$(PY) tools/test_versions.py $(VERSIONS_ARGS)

lint: $(call ready,dev)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy --strict src tests/typed_calls.py
	$(if $(CXX_FILES),$(dir $(PY))clang-format --dry-run -Werror $(CXX_FILES))

format: $(call ready,dev)
	$(PY) -m ruff check --fix
	$(PY) -m ruff format
	$(if $(CXX_FILES),$(dir $(PY))clang-format -i $(CXX_FILES))

bench: $(call ready,bench)
	$(PY) -m bench

# Tables and the plot of the docs, from bench/results.
plots: $(call ready,bench)
	$(PY) -m bench.tables
	$(PY) -m bench.plots bench/results/nvidia-h200.json bench/results/lists.json bench/results/sparse.json docs/img

# Compares with the baseline of this kind of machine: instructions decide, times are shown.
bench-ci: $(call ready,test)
	$(PY) -m bench --ci $(BENCH_ARGS)

# The host module under Address- and UBSan, its threads under TSan; on a GPU also compute-sanitizer
# (of the CUDA toolkit) over the kernels. SANITIZE="memcheck --thin 5": one tool, every fifth test.
sanitize: $(call ready,test)
	$(PY) tests/sanitize.py $(SANITIZE)

docs: $(call ready,docs)
	$(PY) -m mkdocs build --strict

wheel: $(call ready,cuda)
	$(PY) -m pip wheel . --no-deps -w dist

# Compiled kernels, which kernels/kernels.toml lists, for machines without NVRTC. Made by the NVRTC of
# this environment (JITKERN_NVRTC chooses another), not by whichever is the newest: no isolation.
kernels-wheel: $(call ready,release)
	$(PY) -m pip wheel ./kernels --no-deps --no-build-isolation -w dist

# Builds wheel and sdist into dist/, and checks them as a user would.
release-check: $(call ready,release)
	$(PY) tools/release_check.py $(RELEASE_ARGS)

# Whether pip can install the wheel beside each engine; nothing is installed.
resolve-check: wheel
	$(PY) tools/resolve_check.py dist/jitkern-*.whl

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.ready-%: pyproject.toml constraints.txt tools/setup_venv.py
	$(PYTHON) tools/setup_venv.py $(VENV) $*
	touch $@
