# SPDX-License-Identifier: Apache-2.0
#
# make test, make custom-op, make demo, make bench, make lint: each in a virtual
# environment of its own making. make cuda adds the CUDA kernels to it; that needs nvcc, but no GPU.
# make wheel: what is released, in dist, tried where it is all that is installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python files are used in place; these have to be installed again.
SOURCES := pyproject.toml CMakeLists.txt $(wildcard cmake/* core/* cpu/*)
RELEASE := .venv-release
BENCH ?= --set ml --json benchmarks/results/latest.json --plot benchmarks/results/latest.png

.PHONY: test custom-op demo bench lint wheel cuda clean

test: $(VENV)/with-test,bench
	$(BIN)/python -m pytest -n auto --dist loadfile

# A package that adds an operator: installed beside ours, and tested there.
custom-op: $(VENV)/with-test
	$(BIN)/python -m pip install --quiet examples/custom_op
	$(BIN)/python -m pytest -c examples/custom_op/pyproject.toml examples/custom_op/tests

demo: $(VENV)/with-demo
	$(BIN)/python -m examples.demo

bench: $(VENV)/with-bench
	$(BIN)/python -m benchmarks.permute $(BENCH)

lint: $(VENV)/with-lint,test,bench,demo
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

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
	rm -rf $(VENV) $(RELEASE) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The optional dependencies "release" without the project itself.
$(RELEASE)/ready: pyproject.toml
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['release'], sep='\n')" > $(RELEASE)/requirements.txt
	$(RELEASE)/bin/python -m pip install --quiet -r $(RELEASE)/requirements.txt
	touch $@

# with-A,B: the project and its optional dependencies A and B.
$(VENV)/with-%: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[$*]'
	touch $@
