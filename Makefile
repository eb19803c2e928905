# The two commands of the README are `make demo` and `make test`; the rest is for those who change the project.
# Everything runs in .venv, which the first target makes and later ones find as it is.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(wildcard kernels/native/*.cpp kernels/native/*.cc kernels/native/*.h kernels/native/*.hpp)
# Two real texts that are on every machine with Python, for kvbench quality.
TEXTS = $(shell $(PYTHON) -c 'import argparse, heapq; print(argparse.__file__, heapq.__file__)')
PYTEST := $(BIN)/python -m pytest

# Threads that wait for each other by spinning lose twofold to threefold on a machine that others use too.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help venv demo million test test-slow test-engines chaos check check-native bench figures proto format clean
.DEFAULT_GOAL := help

help: ## Say what the targets are
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Make .venv with everything in it

$(STAMP): pyproject.toml constraints.txt $(wildcard setup.py) $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python 3.11 or newer is needed: make PYTHON=/path/to/python3 ...")'
	@test -x $(BIN)/python || { echo "making $(VENV): a minute or two, once"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install -qq --upgrade pip
	@echo "installing the project and what it needs into $(VENV)"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[daemon,engine,gpu,dev]'
	@# Byte code now, so that commands start fast even where Python is told not to write any.
	@$(BIN)/python -m compileall -q kvstore kernels engine tools
	@touch $@

demo: $(STAMP) ## Three questions over one long text: cold, warm from HOST, warm from SSD after a restart
	$(BIN)/python -m kvstore.tools.demo

million: $(STAMP) ## Ten needles in a million tokens of which memory holds a quarter; draws the pictures of the README (minutes)
	$(BIN)/python -m kvstore.tools.million

test: $(STAMP) ## Run the tests, those on a real model included (about fifteen minutes on two cores)
	$(BIN)/python -m kvstore.tools.fetch_model
	$(PYTEST) -m 'not slow'

test-slow: $(STAMP) ## Run the suites that take minutes: crash loops, long contexts, many geometries
	$(BIN)/python -m kvstore.tools.fetch_model
	$(PYTEST) -m slow

test-engines: $(STAMP) ## Run other engines with the store, each in an environment of its own in .cache/engines (8 GB, made once)
	$(BIN)/python -m kvstore.tools.engine_venv vllm .cache/engines/vllm
	$(BIN)/python -m kvstore.tools.engine_venv lmcache .cache/engines/lmcache
	$(BIN)/python -m kvstore.tools.engine_venv sglang .cache/engines/sglang
	.cache/engines/vllm/bin/python -m pytest -m engines tests/engines
	.cache/engines/lmcache/bin/python -m pytest -m engines tests/engines
	.cache/engines/sglang/bin/python -m pytest -m engines tests/engines

chaos: $(STAMP) ## Ten minutes of kills, stops, forks, cancelled calls and bad disks; every HIT is checked
	$(BIN)/python -m kvstore.tools.chaos --minutes 10 --seed 1

check: $(STAMP) ## Lint, format, types, and that the generated code is current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m kvstore.tools.protogen --check
	$(BIN)/python -m kvstore.tools.twins --check

check-native: $(STAMP) ## Run the C++ tests under the address, undefined-behaviour and thread sanitizers
	bash kernels/native/check.sh

bench: $(STAMP) ## Run the benchmarks; each prints the limit of this machine beside the figure
	$(BIN)/kvbench store
	$(BIN)/kvbench disk
	$(BIN)/kvbench attention
	$(BIN)/kvbench codec

figures: $(STAMP) ## Run the benchmarks and write what they print into docs/performance.md (half an hour; leave the machine alone)
	$(BIN)/kvbench store --markdown docs/performance.md
	$(BIN)/kvbench crowd --markdown docs/performance.md --plot docs/pictures/crowd.png
	$(BIN)/kvbench disk --markdown docs/performance.md
	$(BIN)/kvbench restart --markdown docs/performance.md
	$(BIN)/kvbench attention --markdown docs/performance.md
	$(BIN)/python -m kvstore.tools.fetch_model
	$(BIN)/kvbench codec --text docs/architecture.md --markdown docs/performance.md
	$(BIN)/kvbench quality --markdown docs/performance.md $(TEXTS)
	$(BIN)/kvbench greedy --markdown docs/performance.md
	$(BIN)/kvbench capacity --markdown docs/performance.md

proto: $(STAMP) ## Make kvstore/v1 anew from protos/
	$(BIN)/python -m kvstore.tools.protogen

format: $(STAMP) ## Format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove what builds and tests leave; keeps .venv and fetched models
	rm -rf build dist .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
	rm -f kernels/*.so
