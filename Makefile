# `make` lists what there is. Everything is installed into .venv; nothing needs root or a GPU.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/pip install --constraint constraints.txt
# `make TORCH=cpu` (or cu128): this build of torch, from its own index, which is asked for it alone.
TORCH_INDEX ?= https://download.pytorch.org/whl/$(TORCH)
# Workers that start together would each compile the package, where a checkout is new.
PYTEST := $(BIN)/python -m compileall -qq -j 0 vitsweep hydra_plugins && $(BIN)/python -m pytest
# One more than there are cores: for a quarter of their time tests wait for processes, sleeps and the disk.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder
DURATIONS := --durations=20 --junit-xml=.pytest_cache/durations.xml
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Tests start some hundred processes: without its bytecode on disk each compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help sweep test test-fast test-extras test-full check docs fix slurm-demo bench bench-gpu rehearse-gpu clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

.venv/installed: pyproject.toml constraints.txt
	@echo "Installing torch and what else vitsweep needs into .venv: some minutes, once."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(if $(TORCH),$(INSTALL) --no-compile --no-deps torch --index-url $(TORCH_INDEX))
	$(INSTALL) --no-compile --editable .
	@echo "Compiling it to bytecode: less than a minute."
	@# pip compiles on one core and what nobody imports too; torch has a file for newer Pythons only
	$(BIN)/python -m compileall -qq -j 0 -x /tests/ .venv/lib || true
	@touch $@

.venv/installed-tests: .venv/installed
	$(INSTALL) --group test --group check --group docs --editable '.[fp8]'
	@touch $@

sweep: .venv/installed  ## which precision and sharding train a ViT fastest here: table and report in minutes
	$(BIN)/python -m vitsweep -m +sweep=first

test: .venv/installed-tests  ## the core's tests and one of each optional feature, 12 minutes on 2 cores
	$(PYTEST) $(WORKERS) $(DURATIONS) -m "not full and not extra"

test-fast: .venv/installed-tests  ## those without the long ones, 6 minutes on 2 cores
	$(PYTEST) $(WORKERS) -m "not slow and not full and not extra"

test-extras: .venv/installed-tests  ## all tests of the optional features, or of the folders EXTRAS=...
	$(PYTEST) $(WORKERS) $(DURATIONS) -m "not full" $(or $(EXTRAS),tests/extras)

test-full: .venv/installed-tests  ## with cross products and long statistics
	$(PYTEST)

check: .venv/installed-tests  ## ruff, mypy, and the links of the documentation
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(MKDOCS)

docs: .venv/installed-tests  ## the documentation, into site/: open site/index.html
	$(MKDOCS)

fix: .venv/installed-tests  ## repair what ruff can, format, and write the tables of docs/ anew
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/python docs/tables.py

slurm-demo: .venv/installed  ## a sweep on a real Slurm of four nodes on this machine
	PYTHON=$(BIN)/python slurm/demo.sh

bench: .venv/installed-tests  ## vitsweep beside its peers, and its own overhead
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/sweep_overhead.py --local
	$(BIN)/python benchmarks/compose_cells.py
	$(BIN)/python benchmarks/loaders.py

bench-gpu:  ## what one GPU can tell in MINUTES=9: the product, peers, techniques one by one, kernels, a profile; PARTS=a,b OUT=folder
	$(PYTHON) benchmarks/gpu.py --minutes $(or $(MINUTES),9) $(if $(PARTS),--parts $(PARTS)) $(if $(OUT),--out $(OUT))

rehearse-gpu:  ## a step of every technique, and whole runs, on fake CUDA tensors, without a GPU; CASES="product precision=O2 ..."
	benchmarks/rehearsal/run.sh $(CASES)

clean:  ## remove the environment and caches, never results
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache site
