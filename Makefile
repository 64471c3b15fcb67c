# What people and CI run. Everything happens inside $(VENV), which tools/install.sh makes and completes.
VENV ?= .venv
# Test files at a time. Most of them wait half of their time for processes to start.
WORKERS ?= 2
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
.DEFAULT_GOAL := help
.PHONY: help quickstart compare test lint types unit numerics dist integration bench format clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

quickstart:  ## install, then train two credit rules from one start and plot them (CPU, minutes)
	tools/install.sh $(VENV)
	$(BIN)/megatrl compare recipes/quickstart.yaml

compare:  ## the longer comparison: GRPO, TRACE, DeltaTTG (CPU)
	tools/install.sh $(VENV)
	$(BIN)/megatrl compare recipes/compare.yaml

test:  ## install everything tests need, then lint, types and every test
	tools/install.sh $(VENV) test textworld
	$(MAKE) lint types
	$(PYTEST) tests -n $(WORKERS) --dist loadfile

lint:  ## ruff and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types:  ## pyright over the whole package and its tests
	$(BIN)/pyright --pythonpath $(BIN)/python

unit:  ## fast tests: no megatron, sglang or ray
	$(PYTEST) tests/unit

numerics:  ## formulas in float64
	$(PYTEST) tests/numerics

dist:  ## gloo process groups on this machine
	$(PYTEST) tests/distributed

integration:  ## real SGLang and Ray
	$(PYTEST) tests/integration

bench:  ## measure the actor and the frozen scorers on this machine
	$(BIN)/python -m benchmarks.actor
	$(BIN)/python -m benchmarks.scoring

format:  ## rewrite files as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## delete caches, not runs and models
	rm -rf .pytest_cache .ruff_cache .hypothesis build dist megatrl.egg-info
	find megatrl tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
