# Each target sets up what it needs, in .venv, on a fresh clone with Python 3.10 or newer.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: demo test thorough shuffled golden check bench fuzz kills peers docs clean
.DEFAULT_GOAL := help

help:            ## what there is
	@grep -E '^[a-z]+: .*## ' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/'

demo: $(VENV)/.base      ## inspect, verify and prune shipped checkpoints
	@BIN=$(BIN) sh tests/demo.sh

# Hundreds of tests start a process, which imports compiled modules four times as fast as sources.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.test      ## the whole suite, frameworks included
	TMPDIR=$$(sh tests/tmpdir.sh) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

thorough: export PYTHONDONTWRITEBYTECODE =
thorough: $(VENV)/.test  ## all of it: full matrices, thousands of examples, kills, ten minutes of mutations
	TMPDIR=$$(sh tests/tmpdir.sh) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m '' --hypothesis-profile thorough $(ARGS)
	$(BIN)/python -m tests.security.fuzz --seconds 600
	$(MAKE) kills

shuffled: $(VENV)/.test  ## the suite ten times, in other orders, time zones, languages and places
	BIN=$(BIN) JOBS=$(JOBS) sh tests/shuffled.sh $(ARGS)

golden: $(VENV)/.test    ## rewrite the answers that tests expect, in tests/golden; read the difference
	$(BIN)/python -m pytest -q --write-golden -m '' $(ARGS)

check: $(VENV)/.test     ## formatting, lint, types, layers, words
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.whole_programs 199
	$(BIN)/python -m tests.words

bench: $(VENV)/.test     ## speed and memory against the peers; AGAINST=REV: against an earlier commit; ARGS=quick
	$(BIN)/python -m compileall -q ckpttool tests/benchmarks
	$(BIN)/python -m tests.benchmarks $(if $(AGAINST),--against $(AGAINST)) $(ARGS)

fuzz: $(VENV)/.test      ## mutated fixtures, for a minute or ARGS='--seconds 3600 --seed 1'
	$(BIN)/python -m tests.security.fuzz $(ARGS)

kills: $(VENV)/.test     ## interrupt every command at every call, and 500 processes at random moments
	$(BIN)/python -m tests.kill_matrix
	$(BIN)/python -m tests.sigkills 500

peers: $(VENV)/.test .venv-peers/.ready  ## other scanners beside ckpttool over hostile and honest files
	$(BIN)/python -m tests.security.peers .venv-peers/bin/python

docs: $(VENV)/.docs      ## pictures, reference pages and the site
	$(BIN)/python docs/pictures.py
	$(BIN)/python -m ckpttool config --schema > docs/reference/ckpttool.schema.json
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: $(VENV)/.python pyproject.toml
	$(PIP) --editable .
	$(BIN)/python -m compileall -q ckpttool
	@touch $@

# PyTorch first and alone: under the pin no other package can bring a build with CUDA.
$(VENV)/.test: $(VENV)/.base pyproject.toml constraints.txt
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable '.[dev,frameworks]'
	@touch $@

.venv-peers/.ready: tests/security/peers-requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(VENV)/.docs: $(VENV)/.test
	$(PIP) --constraint constraints.txt --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-peers site .mypy_cache .ruff_cache .pytest_cache
