# `make help` lists the targets. The environment is .venv; it is rebuilt only when what it is made from changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MADE_OF := setup.cfg setup.py pyproject.toml constraints.txt peer/outer/numerics/kernels.c
STAMP := $(VENV)/.atoll-$(shell cat $(MADE_OF) | cksum | cut -d' ' -f1)
COMPILED := $(VENV)/.atoll-compiled
WORKERS ?= 4
REPORT ?=
SEED ?= 17
MINUTES ?= 60
RESUME ?=
RECIPES := $(patsubst %,tests/network/test_%.py,local_rules shared_steps every_step gossip quorum backup called_rounds \
	uneven_peers limits streaming)

.DEFAULT_GOAL := help
.PHONY: help env demo lint style types docs test page long slices recipes architectures bench dist hours chaos clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(COMPILED) ## create .venv with everything pinned (PYTHON=python3.12 picks the interpreter)

$(STAMP): $(MADE_OF)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
		{ echo "atoll: needs Python 3.11 to 3.13, but '$(PYTHON)' is $$($(PYTHON) --version); set PYTHON=" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	rm -f $(VENV)/.atoll-*
	touch $@

$(COMPILED): $(STAMP)  # on all cores, where pip takes one; the linters do not wait for it
	@$(BIN)/python -m compileall -q -j 0 atoll bootstrap peer tests
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true  # templates of packages are no modules
	touch $@

demo: env ## a bootstrap and several peers on this machine (REPORT=file.json keeps the figures)
	$(BIN)/atoll demo $(if $(REPORT),--report $(REPORT))

lint: style types ## style, types, import floors, spelling, plain English, links

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python .ci/prose.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

types: $(STAMP)
	$(BIN)/mypy --strict atoll peer bootstrap benchmarks

docs: env ## the documentation as a site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

test: lint env ## lint, then all tests but the long ones, WORKERS=4 at a time: half of the time they wait
	$(BIN)/pytest tests -x -q -m "not long" -n $(WORKERS) --dist worksteal --ignore=tests/network/chaos --ignore=tests/page

long: env ## the long tests: mixed faults, real trainers that stop and resume, a compiled model, the GPU's benchmark on a CPU
	@$(BIN)/python -c 'import lm_eval, trl' 2>/dev/null || $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check -c constraints.txt -e ".[eval,trl]"
	$(BIN)/pytest tests -x -q -m long -n 1 --ignore=tests/page

page: env ## the bootstrap's page in Chromium, which is installed if there is none: real peers, layouts, keyboard, axe-core
	@$(BIN)/python -c 'import axe_playwright_python' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[browser]"
	@command -v chromium chromium-browser google-chrome >/dev/null || \
		{ apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || $(BIN)/playwright install chromium
	$(BIN)/pytest tests/page -x -q

slices: env ## real swarms under kills, attacks, partitions, bad links, floods, wrong clocks, NAT: slices of the campaigns
	$(BIN)/pytest tests/network/chaos -x -q -m "not long" -n 3 --dist worksteal  # they wait more than they compute

recipes: env ## the long tests of recipes on real agents: beside the simulator, through a kill and with a late join
	$(BIN)/pytest $(RECIPES) -x -q -m long -n 3 --dist worksteal  # they wait more than they compute

architectures: env ## every causal architecture of transformers, tiny, through atoll simulate; into docs/models.md
	$(BIN)/python -m tests.sim.architectures

bench: env ## the headline numbers, one after another (about 20 minutes on two cores), into docs/results/
	@set -e; for name in join memory rounds step devices library pauses simulator chain data leases page drops directory; do \
		echo "== $$name"; \
		$(BIN)/python -m benchmarks.$$name --report docs/results/$$name.json; done
	$(BIN)/python -m benchmarks.groups --report docs/results/groups.json --plot docs/results/groups.png
	$(BIN)/python -m benchmarks.bandwidth --report docs/results/bandwidth.json --plot docs/results/bandwidth.png
	$(BIN)/python -m benchmarks.state_transfer --report docs/results/state_transfer.json \
		--plot docs/results/state_transfer.png
	$(BIN)/python -m benchmarks.table

dist: env ## sdist and wheel in dist/; the wheel installed into an empty environment, which runs the demo
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	rm -rf build/installed && $(PYTHON) -m venv build/installed
	build/installed/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build && installed/bin/atoll demo --rounds 8 --output-dir demo

hours: env ## hours of whole swarms in virtual time, under the faults of honest machines: a minute an hour
	$(BIN)/python -m benchmarks.hours --seed $(SEED) --report docs/results/hours.json
	$(BIN)/python -m benchmarks.table

chaos: env ## kills, stops, partitions, links, hostile peers, floods, clocks, disks, secrets, a soak (MINUTES=60 a campaign, SEED=17, RESUME=1 continues)
	$(BIN)/python -m tests.network.chaos --report docs/results/chaos.json --seed $(SEED) --minutes $(MINUTES) \
		$(if $(RESUME),--resume)
	$(BIN)/python -m benchmarks.table

clean: ## remove .venv, caches and build leftovers; runs/ is kept
	rm -rf $(VENV) build dist *.egg-info peer/outer/numerics/_kernels*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find atoll peer bootstrap tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
