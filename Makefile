PYTHON ?= python3
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --constraint constraints.txt --editable
SIDE_BY_SIDE := --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: train test test-fast test-all lint check-types check-style docs page install clean

train: .venv/paceline  ## train a CNN on handwritten digits on 2 processes
	$(BIN)/paceline train digits --ranks 2

test: install lint  ## the test suite, without the long sweeps
	$(BIN)/pytest $(SIDE_BY_SIDE)

test-fast: install lint  ## the tests that start no training processes and no other programs
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "not (slow or processes or slurm or mpi or ray or network or browser or ssh or docs)"

test-all: install .venv/compare lint  ## with the long sweeps, and the tools that Paceline is compared with
	$(BIN)/pytest $(SIDE_BY_SIDE) -m ""

lint: install
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-types check-style

check-types:
	$(BIN)/mypy

check-style:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mdformat --check *.md benchmarks/*.md docs/*.md examples/*.md

docs: .venv/docs  ## the documentation site, in build/docs; warnings are errors
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet -d build/doctrees docs build/docs

page: .venv/paceline  ## the page of `paceline watch`, which an installation builds too; requires network access
	$(BIN)/python page/backend.py

install: .venv/installed

# What training needs: torch, and eight small packages with what they depend on.
.venv/paceline: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing Paceline and torch into .venv: 0.2 GB to download for the CPU build of torch, over 2 GB for the CUDA build."
	$(PIP) .
	touch $@

# What tests and linters need besides. Open MPI, MPICH, iproute2, tmux, slurm-wlm, munge, chromium and openssh are for tests only; where they cannot
# be installed, their tests say so and are left out.
.venv/installed: .venv/paceline
	@echo "Installing what tests and linters need into .venv: about 0.3 GB to download."
	$(PIP) ".[dev,docs]"
	touch $@

# The tools of "Coming from …" and of the adapters, and JupyterLab. DeepSpeed is built from source and left out.
.venv/compare: .venv/installed
	@echo "Installing the tools that tests compare with into .venv: about 30 MB to download."
	$(PIP) ".[compare]"
	touch $@

.venv/docs: .venv/paceline
	@echo "Installing what the documentation needs into .venv: about 30 MB to download."
	$(PIP) ".[docs]"
	touch $@

clean:
	rm -rf .venv
