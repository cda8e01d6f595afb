# make demo: install into .venv and run the demo.  make test: install and run lint, types and tests.
# make docs: build the pages and the API into site/.
# PYTHON and VENV choose another interpreter and folder: make test PYTHON=python3.12 VENV=.venv312
PYTHON ?= python3
VENV ?= .venv
DEMO ?= --out shapebucket-demo
BIN = $(VENV)/bin

.PHONY: demo test lint types quick docs clean

demo: $(VENV)/.demo
	$(BIN)/shapebucket demo $(DEMO)

test: lint types
	$(BIN)/python -m pytest

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	PATH="$(abspath $(BIN)):$$PATH" pyright

docs: $(VENV)/.dev
	$(BIN)/python -m mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("shapebucket needs Python 3.11 or newer: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) build dist site shapebucket-demo
