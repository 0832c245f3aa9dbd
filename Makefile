PYTHON ?= python3
BIN := .venv/bin
SIDE_BY_SIDE := --numprocesses logical --maxprocesses 4 --dist loadfile

.PHONY: train test test-all lint install clean

train: install  ## train a CNN on handwritten digits on 2 processes
	$(BIN)/paceline train digits --ranks 2

test: install lint  ## the test suite, without the long sweeps
	$(BIN)/pytest $(SIDE_BY_SIDE)

test-all: install lint  ## with the long sweeps
	$(BIN)/pytest $(SIDE_BY_SIDE) -m ""

lint: install
	$(BIN)/ruff check
	$(BIN)/mypy

install: .venv/installed

# Open MPI, MPICH, iproute2, tmux, slurm-wlm and munge are for tests only; where they cannot be installed, their tests say so and are left out.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv
