# Two commands do all the set-up: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

demo: $(VENV)/demo.stamp
	$(BIN)/kvplan demo

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n auto --cov --cov-report=term

lint: $(VENV)/lint.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/test.stamp
	$(BIN)/python -m benchmarks

$(VENV)/pip.stamp:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@touch $@

# Each set of packages is one dependency group of pyproject.toml.
$(VENV)/%.stamp: $(VENV)/pip.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[cli]" --group $*
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
