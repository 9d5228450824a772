# Every target makes its own virtual environment first, on a machine that has nothing but Python.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Where a machine forbids it, thousands of short processes would compile all that they import, each for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-changed test-all check site bench prove weeks clean slurm-up slurm-down slurm-packages browser-packages

DIR ?= demo

demo: .venv/ready        ## a small project in $(DIR), every stage run on this machine
	test $(DIR) != demo || rm -rf demo
	pipeline demo $(DIR)

# Two more than there are cores: those on Slurm wait more than they work, in two shares.
WORKERS ?= $(shell expr $$(nproc) + 2)

# Each worker is a process that has its share of the cores, and no threads of torch's besides.
test test-changed test-all: export OMP_NUM_THREADS = 1

test: .venv/tools slurm-packages browser-packages  ## the gate, as CI runs it; brings up a real Slurm where it can
	pytest -n $(WORKERS) -m "not nightly"

BASE ?= origin/main
test-changed: .venv/tools slurm-packages browser-packages  ## the nightly tests that what changed since $(BASE) can reach
	pytest -n $(WORKERS) -m nightly --changed-since $(BASE)

test-all: export PIPELINE_TEST_EXAMPLES = night
test-all: .venv/tools slurm-packages browser-packages  ## all of them
	pytest -n $(WORKERS)

check: .venv/tools       ## style, types, import rules, frozen help; under a minute
	ruff check .
	ruff format --check .
	mypy
	lint-imports --no-cache
	pytest -q tests/cli/test_help.py

site: .venv/tools        ## docs/ as pages for a browser, build/site/index.html
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

bench: .venv/tools       ## the figures of benchmarks/README.md that a small machine can measure, in less than 20 minutes
	python benchmarks/all.py

prove: .venv/tools slurm-packages  ## the long proofs: kills, faults, scale; results are committed
	python benchmarks/store/prove_cache.py --out benchmarks/results/prove_cache.json
	python benchmarks/structures/scan_memory.py --out benchmarks/results/scan_memory.json
	python benchmarks/structures/scan_memory.py --stage graph --out benchmarks/results/graph_memory.json
	python benchmarks/structures/split.py --whole 20000 --out benchmarks/results/split.json
	python benchmarks/encoder/prove_embed.py --out benchmarks/results/prove_embed.json
	python benchmarks/encoder/embed_growth.py --out benchmarks/results/embed_growth.json
	python benchmarks/encoder/export_growth.py --out benchmarks/results/export_growth.json
	python benchmarks/encoder/parity.py --out benchmarks/results/encoder_parity.json
	for shape in 150M 650M; do \
	  python benchmarks/encoder/embed.py --shape $$shape --out benchmarks/results/embed_$$shape.json || exit 1; done
	python benchmarks/runs/slurm.py --out benchmarks/results/slurm.json
	python benchmarks/runs/swept.py --out benchmarks/results/swept.json
	python benchmarks/training/prove_train.py --out benchmarks/results/prove_train.json
	python benchmarks/training/train_memory.py --out benchmarks/results/train_memory.json
	python benchmarks/runs/scale.py --million 1000000 --metadata --out benchmarks/results/scale.json
	python benchmarks/runs/scale_slurm.py --out benchmarks/results/scale.json
	python -m benchmarks.scale_parts.page
	python benchmarks/memory/planner.py --only limited,guides --out benchmarks/results/planner.json
	python benchmarks/memory/recipes.py --out benchmarks/results/recipes.json
	python benchmarks/training/train.py --out benchmarks/results/train.json
	python benchmarks/training/learn.py --out benchmarks/results/learn.json
	python benchmarks/docking/learning.py --out benchmarks/results/docking_learning.json
	python benchmarks/store/cache.py --only damage --only mend --out benchmarks/results/cache.json
	python benchmarks/store/cache_compare.py --out benchmarks/results/cache_compare.json
	python benchmarks/runs/fresh.py --test-all --out benchmarks/results/fresh.json
	python benchmarks/mutants.py --out benchmarks/results/mutants.json
	$(MAKE) weeks
	python benchmarks/page.py

SEED ?= 1
MINUTES ?= 180
weeks: .venv/tools slurm-packages  ## weeks of use, played on a real Slurm: what dies, fills, is held or typed twice, by $(SEED)
	python -m tests.weeks --seed $(SEED) --minutes $(MINUTES) --out benchmarks/results/weeks.json

slurm-up: .venv/tools slurm-packages  ## a real Slurm cluster of three nodes on this machine, left running
	python -m tests.testkit.cluster up

slurm-down: .venv/tools  ## ends it and removes all that it left
	python -m tests.testkit.cluster down

# Root on Debian only; elsewhere the tests that need Slurm say what is missing.
SLURM_PACKAGES := slurmctld slurmd slurmdbd slurm-client munge mariadb-server podman crun acl
SLURM_PROGRAMS := slurmctld slurmd slurmdbd sbatch munged mariadbd podman crun setfacl
slurm-packages:          ## Slurm and podman from the distribution, where they are missing
	@if PATH=$$PATH:/usr/sbin:/sbin which $(SLURM_PROGRAMS) >/dev/null; then :; \
	elif test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(SLURM_PACKAGES); \
	fi || echo "Slurm or podman could not be installed: their tests will say so"

browser-packages:        ## Chromium from the distribution, where there is none: the report's page is looked at in it
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium; \
	fi || echo "Chromium could not be installed: its tests will say so"

clean:                   ## what the targets above made
	rm -rf .venv demo

# Made anew when a dependency changes; half an environment is never taken for a whole one.
# Errors of pip are shown, its warnings are not: they would fill the first screen.
INSTALL := $(BIN)/pip install --quiet --quiet --disable-pip-version-check --no-compile -c constraints.txt
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(INSTALL) -e '.[bcif]'
	touch $@

.venv/tools: .venv/ready
	$(INSTALL) -e '.[bcif,bench,test]'
	touch $@
