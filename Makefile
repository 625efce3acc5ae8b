VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3

.PHONY: install demo test lint docs clean

install: $(VENV)/installed

# Everything comes from the one pinned file; the package itself is installed editable without asking for more.
$(VENV)/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

demo: install
	$(BIN)/treegraft demo --out runs/demo

test: install
	$(BIN)/pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) runs
