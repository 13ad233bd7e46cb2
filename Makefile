# Every target sets up what it needs; `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENGINE ?= sim
TEMPLATES ?= $(TOKENSPLICE_TEMPLATES)
DURABILITY ?= sync
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench templates soak format lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## a virtual environment in .venv with everything in the lock file

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed; name one: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

demo: setup ## the main job end to end, with crashes on the way; ENGINE=real samples from a real small model
	$(BIN)/tokensplice demo --engine $(ENGINE)

# TEMPLATES=folder tests against more chat templates than the ones that PyPI has.
test: export TOKENSPLICE_TEMPLATES := $(TEMPLATES)
test: setup ## every test, against real servers that it starts itself
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: setup ## lint, format, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@! grep -rnE 'TODO|FIXME|XXX' --include='*.py' --include='*.lua' api store splice migrations tests

bench: setup ## worker CPU a turn and Redis bytes a token against context
	$(BIN)/tokensplice bench

soak: setup ## ten minutes of rollouts while workers, Redis and connections die; DURABILITY=memory, aof or sync
	$(BIN)/python -m tests.faults.soak --durability $(DURABILITY)

templates: setup ## write the tables in docs/templates.md anew; TEMPLATES=folder adds templates of your own
	TOKENSPLICE_TEMPLATES=$(TEMPLATES) $(BIN)/python -m tests.splice.template_table docs/templates.md

format: setup ## format the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: setup ## write requirements.lock anew from pyproject.toml
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --generate-hashes --no-emit-index-url \
		--no-emit-find-links --no-header --quiet --output-file requirements.lock

clean: ## remove what was made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
