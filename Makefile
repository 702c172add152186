# Needs Python ≥ 3.11 with venv and pip; everything else goes into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
LOCK := $(wildcard requirements.lock)
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check $(LOCK:%=-c %)

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format bench lock clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1: /p' $(MAKEFILE_LIST) | awk -F': ' '{printf "  make %-9s %s\n", $$1, $$2}'

install: .venv/.runtime ## Normstudy and what it stands on, into .venv

demo: .venv/.runtime ## a study from nothing running to a verdict (ARGS=--keep to look around after)
	@$(BIN)/normstudy demo $(ARGS)

test: .venv/.dev ## all tests (ARGS="tests/service -k client" for some)
	$(BIN)/pytest $(ARGS)

lint: .venv/.dev ## ruff, pyright, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

format: .venv/.dev ## put the code into its form
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: .venv/.bench ## measure speed against the ratios to reach, in some ten minutes (ARGS=--deep for longer)
	$(BIN)/python -m benchmarks $(ARGS)

lock: .venv/.dev ## write the installed versions to requirements.lock
	$(BIN)/python -m pip freeze --exclude-editable > requirements.lock

clean: ## remove caches and build products; .venv and studies stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Normstudy needs Python 3.11 or later: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv

# The stamps are made anew when what is to be installed has changed.
.venv/.runtime: pyproject.toml $(LOCK) | .venv/bin/python
	@echo "Installing Normstudy into .venv; the first time this takes minutes and some gigabytes (torch)."
	$(PIP) -e .
	@touch $@

.venv/.dev: pyproject.toml $(LOCK) | .venv/bin/python
	$(PIP) -e '.[dev]'
	@touch $@ .venv/.runtime

.venv/.bench: .venv/.dev
	$(PIP) -e '.[dev,bench]'
	@touch $@
