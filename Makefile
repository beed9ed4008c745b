# `make demo` and `make test` work on a fresh machine with python3 (3.11 or newer) and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check-python clean

demo: .venv/installed
	$(BIN)/python examples/demo.py

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "flatrock needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=/path/to/python3.11")'

.venv/installed: requirements.lock pyproject.toml | check-python
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# --no-deps: two peers we measure against ask for torchvision, which they do not need for what we use.
.venv/installed-dev: .venv/installed requirements-dev.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-dev.lock
	@touch $@

clean:
	rm -rf .venv runs/demo
