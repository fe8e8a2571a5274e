# SPDX-License-Identifier: Apache-2.0
#
# make test, make custom-op, make demo, make bench, make bench-all, make lint, make docs:
# each in a virtual environment of its own making. make wheel: what is released, in dist,
# tried where it is all that is installed. make try: test with the newest release of jax in
# a fresh environment, pre-releases included, or with JAX=0.12.0, and what became slower.
#
#   PYTHON  the interpreter, by default the first of these that runs: jax's newest releases
#           need 3.12
#   JAX     a version of jax instead of the newest
#   TORCH=1 compares with PyTorch too; left out by default, as pip's may bring gigabytes
#           for GPUs
#   CUDA=1  builds the CUDA kernels too, and has jax compile for GPUs; needs nvcc, but no GPU
#   VENV    where the environment is: what has other values of these needs another
SHELL := bash
.SHELLFLAGS := -o pipefail -c
ready := import ensurepip, sys; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for each in python3.12 python3.13 python3.14 python3 python3.11; do \
  $$each -c "$(ready)" 2>/dev/null && echo $$each && break; done)
endif
# Python compiles what it imports; pip would all there is.
export PIP_NO_COMPILE := 1
VENV := .venv
BIN := $(VENV)/bin
# Python files are used in place; these have to be installed again.
SOURCES := pyproject.toml CMakeLists.txt $(shell find cmake core cpu $(if $(CUDA),cuda) -type f)
RELEASE := .venv-release
TRY := .venv-try
BENCH ?= --set ml --json benchmarks/results/latest.json --plot benchmarks/results/latest.png
# More for pytest, such as files.
PYTEST ?=

.PHONY: test test-arm jax-tests custom-op demo bench bench-all lint docs wheel cuda try clean

test: $(VENV)/with-test,bench$(TORCH:1=,torch)
	$(if $(CUDA),JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1) \
	  $(BIN)/python -m pytest -n auto --dist loadfile -rs $(PYTEST)

# The CPU kernels built for AArch64, against plain loops, under qemu. Needs no environment,
# but the packages g++-aarch64-linux-gnu and qemu-user-static.
test-arm:
	PYTHONPATH=tests $(PYTHON) tests/arm/emulate.py

# JAX's own tests of products, transposes and convolutions, with the drop-ins in place of
# its functions: make jax-tests JAX_TESTS=path/of/jax/tests, a folder of JAX's repository;
# INSTALLED=1 with jl.install() instead, and more of them.
JAX_FILES := lax_test lax_numpy_test lax_numpy_einsum_test lax_autodiff_test lax_vmap_test
JAX_MORE := lax_numpy_indexing_test nn_test shard_map_test
jax-tests: $(VENV)/with-test
	$(if $(INSTALLED),JAX_LAYOUT_CHOICES=kernels) PYTHONPATH=tests \
	  $(BIN)/python -m pytest -p upstream -c $(JAX_TESTS)/../pyproject.toml \
	  --rootdir $(JAX_TESTS)/.. $(if $(INSTALLED),--installed --every) $(PYTEST) \
	  $(patsubst %,$(JAX_TESTS)/%.py,$(JAX_FILES) $(if $(INSTALLED),$(JAX_MORE)))

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

# In an environment made anew: JAX, or the newest, pre-releases included. The programs for
# an H100 are compiled where nvcc is. Then, for so many minutes, what became slower.
MINUTES ?= 60
newest = $$($(TRY)/bin/python -m pip index versions --pre jax 2>/dev/null \
  | sed -nE '1s/.*\((.*)\)/\1/p')
try:
	rm -rf $(TRY) build/try
	$(MAKE) $(TRY)/bin/python VENV=$(TRY)
	$(MAKE) test VENV=$(TRY) JAX=$(or $(JAX),$(newest)) CUDA=$(if $(shell command -v nvcc),1)
	$(TRY)/bin/python -m benchmarks.all --quick --minutes $(MINUTES) --results build/try

clean:
	rm -rf $(VENV) $(RELEASE) $(TRY) build dist docs/generated docs/tour.md site *.egg-info

# What pip and the compiler do, a line at a time; all they say is in the log.
steps := s/ \(from .*|-[0-9].*-(cp|py)[0-9].*//; \
  s/^ *(Collecting|Processing) (.*\/)?/  fetching /p; \
  s/^ *Installing (build dependencies|collected packages).*(started|,.*)$$/  installing \1/p; \
  s/^ *(\[[0-9]+\/[0-9]+\]) Building .*nanobind.*/  \1 compiling nanobind/p; \
  s/^ *(\[[0-9]+\/[0-9]+\]) Building .* CMakeFiles\/[^\/]*\/(.*)\.o$$/  \1 compiling \2/p
install = @log=$(VENV)/install.log; $(BIN)/python -m pip install -v $(1) 2>&1 \
  | tee $$log | sed -unE '$(steps)' || { tail -n 40 $$log; exit 1; }

$(BIN)/python:
	$(if $(PYTHON),,$(error Python 3.11 or newer is needed, with its venv; PYTHON=... names one))
	@echo "Creating the environment $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# What these optional dependencies are, without the project itself.
requirements = "import sys, tomllib; \
  extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
  print(*(each for name in sys.argv[1].split(',') for each in extras[name]), sep='\n')"

$(RELEASE)/ready: pyproject.toml
	$(PYTHON) -m venv $(RELEASE)
	$(PYTHON) -c $(requirements) release > $@
	$(RELEASE)/bin/python -m pip install --quiet -r $@

$(VENV)/project: $(SOURCES) | $(BIN)/python
	@echo "Installing jax$(JAX:%= %) and building jax_layout: $(words $(filter %.cc %.cu,$(SOURCES))) files to compile, a minute or two"
	$(call install,-e . $(JAX:%='jax==%') -C build-dir=build/$(VENV) \
	  $(if $(CUDA),-C cmake.define.JAX_LAYOUT_CUDA=ON))
	$(if $(CUDA),@$(cuda_plugin))
	@touch $@

# Compiles for GPUs; what it needs to run on one is left out.
cuda_plugin = $(BIN)/python -m pip install --quiet --no-deps $$($(BIN)/python -c \
  "import jax; print(*(f'jax-cuda13-{part}=={jax.__version__}' for part in ('plugin', 'pjrt')))")

# with-A,B: the project is there, and its optional dependencies A and B.
$(VENV)/with-%: pyproject.toml | $(VENV)/project
	@echo "Installing what is needed for: $*"
	@$(BIN)/python -c $(requirements) $* > $@
	@$(BIN)/python -m pip install --quiet -r $@

.DELETE_ON_ERROR:
