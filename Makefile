# Every target makes its own virtual environment first, on a machine that has nothing but Python.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test check bench prove clean

DIR ?= demo

demo: .venv/ready        ## a small project in $(DIR), every stage run on this machine
	test $(DIR) != demo || rm -rf demo
	pipeline demo $(DIR)

test: .venv/ready        ## everything a change must pass
	pytest

check: .venv/ready       ## style, types, import rules, frozen help; under a minute
	ruff check .
	ruff format --check .
	mypy
	lint-imports --no-cache
	pytest -q tests/cli/test_help.py

bench: .venv/ready       ## the figures of benchmarks/README.md that a small machine can measure
	python benchmarks/scan.py --out benchmarks/results/scan.json
	python benchmarks/store.py --out benchmarks/results/store.json
	python benchmarks/embed.py --runs 3 --out benchmarks/results/embed.json
	python benchmarks/embed_memory.py --out benchmarks/results/embed_memory.json
	python benchmarks/graph.py --out benchmarks/results/graph.json
	python benchmarks/sampler.py --out benchmarks/results/sampler.json
	python benchmarks/loader.py --out benchmarks/results/loader.json
	python benchmarks/startup.py --out benchmarks/results/startup.json

prove: .venv/ready       ## the long proofs: kills, faults, scale; results are committed
	python benchmarks/prove_store.py --out benchmarks/results/prove_store.json
	python benchmarks/scan_memory.py --out benchmarks/results/scan_memory.json
	python benchmarks/scan_memory.py --stage graph --out benchmarks/results/graph_memory.json
	python benchmarks/prove_embed.py --out benchmarks/results/prove_embed.json
	python benchmarks/embed_growth.py --out benchmarks/results/embed_growth.json

clean:                   ## what the targets above made
	rm -rf .venv demo

# Made anew when a dependency changes; half an environment is never taken for a whole one.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bcif,test]'
	touch $@
