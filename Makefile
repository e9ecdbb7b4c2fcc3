# make demo    install into .venv and run the demo
# make test    install into .venv and run the tests
# make check   format, lint, types, house rules

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-slow check bench schemas clean

demo: $(INSTALLED)
	$(BIN)/ropebridge demo

test: $(INSTALLED)
	$(BIN)/pytest

# Longer proofs, kept out of `make test`.
test-slow: $(INSTALLED)
	$(BIN)/pytest -m slow

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/house
	$(BIN)/python tests/house/sizes.py

# The figures in docs/measurements.md.
bench: $(INSTALLED)
	$(BIN)/ropebridge bench simulator
	$(BIN)/ropebridge bench schedules
	$(BIN)/ropebridge bench accuracy
	$(BIN)/ropebridge bench fidelity
	$(BIN)/ropebridge bench adaptation

# JSON Schema of the files that people write, for editors.
schemas: $(INSTALLED)
	$(BIN)/python -m experiments.schemas docs/schemas

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("ropebridge needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[executor,solve,dev]'
	touch $(INSTALLED)

clean:
	rm -rf .venv
