# Two commands on a fresh machine: `make tune` and `make test`. Both make .venv first if it is not there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Which torch: `auto` asks uv to find the build that suits this machine's GPU driver (or the CPU build).
# Choose yourself with TORCH_BACKEND=cpu, cu128, rocm6.4 ... A local wheel folder (PIP_FIND_LINKS or
# UV_FIND_LINKS) that has torch takes precedence, so that nothing is downloaded twice.
TORCH_BACKEND ?= auto
WHEELS := $(or $(UV_FIND_LINKS),$(PIP_FIND_LINKS))
TORCH_FLAG := $(if $(wildcard $(addsuffix /torch-*.whl,$(WHEELS))),,--torch-backend=$(TORCH_BACKEND))

.PHONY: tune test test-exports lint types bench bench-model clean

tune: $(VENV)/installed
	$(BIN)/python tune.py

test: $(VENV)/installed lint types
	$(BIN)/python -m pytest

# Plans exported and loaded by the frameworks themselves, each in an environment of its own; NAMES="verl trl" for some.
test-exports: $(VENV)/installed
	UV_FIND_LINKS="$(WHEELS)" $(BIN)/python tests/exports/run.py $(NAMES)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python tests/bench.py

# The model against published measurements; ARGS="--data DIR" for another folder of files with the same columns.
bench-model: $(VENV)/installed
	$(BIN)/python tests/bench_model.py $(ARGS)

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	UV_FIND_LINKS="$(WHEELS)" $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode \
		--constraint constraints.txt $(TORCH_FLAG) --editable ".[runtime,dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-exports .pytest_cache .mypy_cache .ruff_cache .hypothesis
