# Every target makes its own virtual environment first, on a machine that has nothing but Python.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Where a machine forbids it, thousands of short processes would compile all that they import, each for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo picture test test-changed test-all check site bench prove weeks clean slurm-up slurm-down slurm-packages browser-packages

DIR ?= demo

demo: .venv/ready        ## a small project in $(DIR), every stage run on this machine
	@test "$(DIR)" != demo || rm -rf demo
	pipeline demo "$(DIR)"

picture: .venv/tools browser-packages demo  ## docs/report.png, the first screen of a new demo's HTML report
	python -m tests.docs.pictures "$(DIR)/report.html"

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

check: .venv/tools       ## style, types, import rules, the reference; under a minute
	ruff check .
	ruff format --check .
	mypy
	lint-imports --no-cache
	pytest -q tests/docs/test_reference.py

site: .venv/tools        ## docs/ as pages for a browser, build/site/index.html
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

# Each prints its rows; `make bench SAVE=--save` puts them into benchmarks/README.md.
bench: .venv/tools       ## the figures of benchmarks/README.md that a small machine can measure, in less than 20 minutes
	for script in scan_graph embed loader training store latency; do python benchmarks/$$script.py $(SAVE) || exit 1; done
	python benchmarks/planner.py --only accuracy,large $(SAVE)

prove: .venv/tools slurm-packages  ## what takes hours: growth to a hundred thousand and a million complexes, weeks of use
	python benchmarks/planner.py --only limits $(SAVE)
	python benchmarks/five_ways.py $(SAVE)
	python benchmarks/growth.py $(SAVE)
	python benchmarks/slurm.py $(SAVE)
	python benchmarks/slurm.py --complexes 1000000 --stages scan,embed,graph,train --against 10000 $(SAVE)
	$(MAKE) weeks

SEED ?= 1
MINUTES ?= 180
weeks: .venv/tools slurm-packages  ## weeks of use, played on a real Slurm: what dies, fills, is held or typed twice, by $(SEED)
	python -m tests.weeks --seed $(SEED) --minutes $(MINUTES)

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
	$(INSTALL) -e '.[bcif,hdf5,images]'
	touch $@

.venv/tools: .venv/ready
	$(INSTALL) -e '.[bcif,bench,test]'
	touch $@
