# `make demo` and `make test` need Python 3.11 or newer, pip and make; nothing else. A second call is quick.

PYTHON ?= python3
VENV := .venv
SGLANG := .venv-sglang
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-sglang lint format down clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.installed ## Install, then run the whole loop on a tiny model; everything keeps running for you
	$(BIN)/rsi demo

test: $(VENV)/.installed-dev ## Install, then run the tests
	$(PYTEST) -q

test-full: $(VENV)/.installed-dev ## The tests, the long ones included
	CI_FULL=1 $(PYTEST) -q

test-sglang: $(VENV)/.installed-dev $(SGLANG)/.installed ## Our client and a PPO step against the real SGLang server on the CPU (3.5 GB more)
	RSI_TEST_SGLANG=$(abspath $(SGLANG))/bin/python $(PYTEST) -q -s -m sglang tests/sglang

lint: $(VENV)/.installed-dev ## Style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.installed-dev ## Rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

down: ## Stop everything that `make demo` or `rsi up` left running
	@test ! -x $(BIN)/rsi || $(BIN)/rsi down

clean: down ## Remove the venvs and what tools leave behind; .rsi, which holds your cycles, stays
	rm -rf $(VENV) $(SGLANG) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; '$(PYTHON)' is $$($(PYTHON) --version). Name another: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "The venv cannot be made; on Debian install python3-venv."; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); the first time takes a few minutes (torch is 750 MB)."
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); the first time takes a few minutes (torch is 750 MB)."
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(SGLANG)/.installed: $(shell find infra/sglang-cpu -type f -not -path '*/__pycache__/*')
	@echo "Installing SGLang into $(SGLANG); the first time takes about five minutes."
	PYTHON=$(BIN)/python infra/sglang-cpu/setup.sh $(SGLANG)
	@touch $@
