# Two commands do all the set-up: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
SGLANG := .venv-sglang
CPU_WHEELS := https://download.pytorch.org/whl/cpu
TORCH = $(shell grep -o -m 1 'torch==[0-9.]*' pyproject.toml)

# Each environment has exactly the packages of its file of constraints, if there is one for this Python's version.
SERIES := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
pip = PIP_CONSTRAINT=$(if $(FREE),,$(wildcard constraints/$(1)-$(SERIES).txt))
PIP = $(call pip,test) $(BIN)/python -m pip install --quiet

.PHONY: demo fast test deep test-peers test-engines test-gpu test-gpu-engines test-sglang lint docs dist bench
.PHONY: clean constraints

# The engine, or plain torch, or numpy alone: the demo takes the best that can be installed, and says which.
demo: $(VENV)/cli.stamp
	@test -e $(VENV)/demo.stamp || echo "installing the demo's engine, once: torch for CPUs and transformers, about 250 MB" \
		"to download and 1 GB on disk; without it: $(BIN)/kvplan demo --engine numpy" >&2
	@$(MAKE) --silent $(VENV)/demo.stamp || $(MAKE) --silent $(VENV)/torch.stamp \
		|| echo "neither the engine nor torch can be installed; the demo runs on numpy" >&2
	$(BIN)/kvplan demo

# Tests start many processes; without compiled files each of them would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# Many tests wait for processes that they start: one worker more than there are cores keeps all cores at work.
WORKERS := $(shell expr $$(nproc) + 1)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --timeout 300 --timeout-method thread

# After an edit, under a minute: the laws with few examples, and what is quick in every room.
HEAVY := $(addprefix --ignore=tests/,benchmarks docs contract/engines/test_transformers.py packaging)
fast: $(VENV)/test.stamp
	HYPOTHESIS_PROFILE=fast $(PYTEST) -q -m "not slow and not engine" $(HEAVY) tests \
		-o addopts="--strict-markers --strict-config --import-mode=importlib"  # looks for no examples in docstrings

test: $(VENV)/test.stamp
	$(PYTEST)

# For hours: eighty times the examples, every class of transformers, mutants that tests must find; then random transfers,
# and processes that are killed; each prints its seed.
deep: $(VENV)/test.stamp
	HYPOTHESIS_PROFILE=deep $(PYTEST) --timeout 7200 tests/laws tests/catalogue
	$(BIN)/python -m tests.deep.mutants
	$(BIN)/python -m tests.deep.soak
	$(BIN)/python -m tests.deep.agents

# On a machine with a CUDA GPU and its own torch: that one is used, and nothing is installed.
test-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu tests/contract/gpu tests/contract/peers -n 8 -p no:cacheprovider -p no:benchmark -q --durations=15

# Whole engines on such a machine, whose Python has vLLM 0.33. The answers go to a file: RECORD=result.json names it.
test-gpu-engines:
	$(PYTHON) -m pytest -m "engines and gpu" tests/whole_engines -n 12 --dist load --maxschedchunk 1 -p no:benchmark \
		--timeout 300 --record $(or $(RECORD),whole-engines.json)

# vLLM builds the cache on the CPU with its own code.
test-peers: $(VENV)/vllm.stamp
	$(BIN)/python -m pytest -m peers tests/peers

# Whole vLLM engines on the CPU, in an environment of their own: vLLM pins other versions than the tests do.
test-engines: $(ENGINES)/engines.stamp
	$(ENGINES)/bin/python -m pytest -m engines -n 2 --dist worksteal --timeout 900 --timeout-method signal tests/whole_engines
	$(ENGINES)/bin/python -m pytest -m engines --timeout 300 --timeout-method signal tests/whole_pairs

# Whole SGLang engines on the CPU, in an environment of their own.
test-sglang: $(SGLANG)/sglang.stamp
	$(SGLANG)/bin/python -m pytest -m engines -n 2 --timeout 600 --timeout-method signal tests/whole_sglang

# Every linter stands in .pre-commit-config.yaml.
lint: $(VENV)/lint.stamp
	$(BIN)/pre-commit run --all-files

# A link that leads nowhere is an error.
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# Wheel and source distribution, each installed into a fresh environment and tried there.
dist: $(VENV)/dist.stamp
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m tests.packaging.distributions dist/*

bench: $(VENV)/test.stamp
	$(BIN)/python -m benchmarks

$(VENV)/pip.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"
	@touch $@

$(VENV)/cli.stamp: $(VENV)/pip.stamp pyproject.toml
	$(PIP) --editable ".[cli]"
	@touch $@

$(VENV)/torch.stamp: $(VENV)/cli.stamp
	@echo "the engine cannot be installed; trying plain torch" >&2
	$(PIP) torch
	@touch $@

# On Linux, PyPI's torch brings the libraries of CUDA, ten times the size. Without the index of CPU wheels, it has to do.
$(VENV)/demo.stamp: $(VENV)/pip.stamp pyproject.toml
	@$(PIP) --retries 0 --timeout 15 --index-url $(CPU_WHEELS) $(TORCH) 2>/dev/null || true
	$(PIP) --editable ".[cli]" --group demo
	@touch $@

# Each set of packages is one dependency group of pyproject.toml.
$(VENV)/%.stamp: $(VENV)/pip.stamp pyproject.toml
	$(PIP) --editable ".[cli]" --group $*
	@touch $@

$(VENV)/vllm.stamp: $(VENV)/peers.stamp
	$(PIP) --no-deps vllm==0.33.0 lmcache==0.5.6
	@touch $@

$(ENGINES)/engines.stamp: tests/whole_engines/install.py pyproject.toml
	$(PYTHON) -m venv $(ENGINES)
	$(call pip,engines) $(ENGINES)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(call pip,engines) $(ENGINES)/bin/python tests/whole_engines/install.py
	$(call pip,engines) $(ENGINES)/bin/python -m pip install --quiet --editable . --group engines
	@touch $@

$(SGLANG)/sglang.stamp: tests/whole_sglang/install.py pyproject.toml
	$(PYTHON) -m venv $(SGLANG)
	$(call pip,sglang) $(SGLANG)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(call pip,sglang) $(SGLANG)/bin/python -m tests.whole_sglang.install
	$(call pip,sglang) $(SGLANG)/bin/python -m pip install --quiet --editable . --group engines
	@touch $@

# Renews the constraints of this Python's version: makes each environment anew of the newest packages, and writes them down.
# Run all tests before you commit the result.
RENEWED := .renewed
constraints:
	rm -rf $(RENEWED) && mkdir -p $(RENEWED) constraints
	$(MAKE) FREE=1 VENV=$(RENEWED)/test ENGINES=$(RENEWED)/engines SGLANG=$(RENEWED)/sglang \
		$(patsubst %,$(RENEWED)/test/%.stamp,test lint docs dist vllm) $(RENEWED)/engines/engines.stamp $(RENEWED)/sglang/sglang.stamp
	for name in test engines sglang; do \
		$(RENEWED)/$$name/bin/python -m pip freeze --all --exclude-editable --exclude kvplan --exclude vllm \
			| sed 's/+[a-z0-9.]*$$//' > constraints/$$name-$(SERIES).txt; done
	rm -rf $(RENEWED)

clean:
	rm -rf $(VENV) $(ENGINES) $(SGLANG) $(RENEWED) build dist site *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
