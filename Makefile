# SPDX-License-Identifier: Apache-2.0
#
# make test, make custom-op, make demo, make bench, make bench-all, make lint, make docs:
# each in a virtual environment of its own making. make cuda adds the CUDA kernels to it; that needs nvcc, but no GPU.
# make wheel: what is released, in dist, tried where it is all that is installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python files are used in place; these have to be installed again.
SOURCES := pyproject.toml CMakeLists.txt $(shell find cmake core cpu -type f)
RELEASE := .venv-release
BENCH ?= --set ml --json benchmarks/results/latest.json --plot benchmarks/results/latest.png

.PHONY: test test-arm jax-tests custom-op demo bench bench-all lint docs wheel cuda clean

test: $(VENV)/with-test,bench
	$(BIN)/python -m pytest -n auto --dist loadfile

# The CPU kernels built for AArch64, against plain loops, under qemu. Needs no environment,
# but the packages g++-aarch64-linux-gnu and qemu-user-static.
test-arm:
	PYTHONPATH=tests $(PYTHON) tests/arm/emulate.py

# JAX's own tests of products, transposes and convolutions, with the drop-ins in place of
# its functions: make jax-tests JAX_TESTS=path/of/jax/tests, a folder of JAX's repository.
JAX_FILES := lax_test lax_numpy_test lax_numpy_einsum_test lax_autodiff_test lax_vmap_test
jax-tests: $(VENV)/with-test
	PYTHONPATH=tests $(BIN)/python -m pytest -p upstream -c $(JAX_TESTS)/../pyproject.toml \
	  --rootdir $(JAX_TESTS)/.. $(JAX_FILES:%=$(JAX_TESTS)/%.py)

# A package that adds an operator: installed beside ours, and tested there.
custom-op: $(VENV)/with-test
	$(BIN)/python -m pip install --quiet examples/custom_op
	$(BIN)/python -m pytest -c examples/custom_op/pyproject.toml examples/custom_op/tests

demo: $(VENV)/with-demo
	$(BIN)/python -m examples.demo

bench: $(VENV)/with-bench
	$(BIN)/python -m benchmarks.permute $(BENCH)

# Everything that this machine can measure, in every profile: hours; QUICK=1 for a
# quarter of an hour a profile, BENCH_ALL="--only gemm --minutes 30" and the like.
bench-all: $(VENV)/with-bench,torch
	$(BIN)/python -m benchmarks.all $(if $(QUICK),--quick) $(BENCH_ALL)

lint: $(VENV)/with-lint,test,bench,demo
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

# The site, in site/; its figures, plots and tables are made first, its notebook runs.
docs: $(VENV)/with-docs
	$(BIN)/python -m docs.figures
	$(BIN)/python -m docs.plots
	$(BIN)/python -m nbconvert --log-level WARN --execute --to markdown \
	  --ExecutePreprocessor.extra_arguments=--log-level=ERROR \
	  --output-dir docs docs/tour.ipynb
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

# The wheel is built from the source distribution, as pip would.
wheel: $(RELEASE)/ready
	rm -rf dist build/dist
	$(RELEASE)/bin/python -m build --outdir build/dist
	PATH="$(CURDIR)/$(RELEASE)/bin:$$PATH" auditwheel repair --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist
	$(RELEASE)/bin/python -m twine check --strict dist/*
	$(RELEASE)/bin/python tests/wheel.py dist/*.whl

cuda: | $(BIN)/python
	$(BIN)/python -m pip install -e '.[cuda13]' -C cmake.define.JAX_LAYOUT_CUDA=ON

clean:
	rm -rf $(VENV) $(RELEASE) build dist docs/generated docs/tour.md site *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What these optional dependencies are, without the project itself.
requirements = "import sys, tomllib; \
  extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
  print(*(each for name in sys.argv[1].split(',') for each in extras[name]), sep='\n')"

$(RELEASE)/ready: pyproject.toml
	$(PYTHON) -m venv $(RELEASE)
	$(PYTHON) -c $(requirements) release > $@
	$(RELEASE)/bin/python -m pip install --quiet -r $@

$(VENV)/project: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e .
	touch $@

# with-A,B: the project is there, and its optional dependencies A and B.
$(VENV)/with-%: pyproject.toml | $(VENV)/project
	$(PYTHON) -c $(requirements) $* > $@
	$(BIN)/python -m pip install --quiet -r $@

.DELETE_ON_ERROR:
