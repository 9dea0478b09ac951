# One place for what a developer and CI run. `make help` lists everything.
SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?= smollm2-135m
PYTEST_FLAGS ?=

.PHONY: help env demo test check lint types format pytest wheel clean

help: ## List the targets.
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-8s %s\n", $$1, $$2 }'

env: $(STAMP) ## Make the environment in .venv: the package, editable, with all developers' tools.

# The stamp is newer than pyproject.toml exactly when what is installed is what it asks for.
$(STAMP): pyproject.toml
	@echo "== environment in $(VENV) (the first time it fetches torch, which takes minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP) ## Fetch the default model, measure n-gram speculation on a few prompts, show an answer.
	@echo "== model $(MODEL)"
	@$(BIN)/specserve pull $(MODEL)
	@echo "== plain decoding and --drafter ngram on the bundled prompts"
	@$(BIN)/specserve bench --model $(MODEL) --drafter ngram --limit 6 --max-tokens 64 --show 1

test: check pytest ## Everything CI runs: lint, types and all tests, those of the real model too.

check: lint types ## What needs no tests to run: lint and types.

lint: $(STAMP) ## Check style and formatting.
	@echo "== ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .

types: $(STAMP) ## Check types, strictly.
	@echo "== mypy"
	@$(BIN)/mypy

pytest: $(STAMP) ## Run the tests; PYTEST_FLAGS="-k name -x" picks some.
	@echo "== model $(MODEL), whose tests may not be skipped"
	@$(BIN)/specserve pull $(MODEL)
	@echo "== pytest"
	@SPECSERVE_REQUIRE_MODEL=1 $(BIN)/python -m pytest -q $(PYTEST_FLAGS)

format: $(STAMP) ## Format the code and fix what ruff can fix.
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

wheel: $(STAMP) ## Build the wheel into dist/ and try it in an environment of its own, from another folder.
	@echo "== wheel"
	@rm -rf build/wheel && mkdir -p build/wheel dist
	@$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps -w build/wheel .
	@$(PYTHON) -m venv build/wheel/venv
	@build/wheel/venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps build/wheel/*.whl
	@cd build/wheel && venv/bin/python -c \
	  "import pkgutil, specserve.drafters as d; print('specserve', *d.__path__, *(m.name for m in pkgutil.iter_modules(d.__path__)))"
	@mv build/wheel/*.whl dist/

clean: ## Remove what was built and cached here; the environment and the models stay.
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
