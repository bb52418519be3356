# Two commands matter: `make serve` and `make test`. Both work from a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS   ?=

.PHONY: install serve test check fix bench demo clean help
.DEFAULT_GOAL := help

help:
	@echo "make serve   start the server with the embedded model (ARGS='--port 9000')"
	@echo "make test    install the test extras and run every test"
	@echo "make check   format, lint, types, import contracts"
	@echo "make fix     reformat and apply safe fixes"
	@echo "make bench   what the scheduler costs, and what its policies do"
	@echo "make demo    train the embedded model again (under an hour on two cores)"

$(VENV)/.python: 
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# PyTorch first, on its own: nothing that follows can then pull another build.
$(VENV)/.torch: $(VENV)/.python constraints.txt
	@echo "installing PyTorch (about 200 MB, once)"
	@$(PIP) $$(grep '^torch==' constraints.txt)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "installing quire"
	@$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	@echo "installing the test and check tools"
	@$(PIP) -e '.[test,dev]'
	@touch $@

install: $(VENV)/.installed

serve: install
	@$(BIN)/quire serve $(ARGS)

test: $(VENV)/.test
	@$(BIN)/python tools/get_prometheus.py $(VENV)/prometheus
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python benchmarks/scheduler_cost.py
	$(BIN)/python benchmarks/policies.py
	$(BIN)/python benchmarks/observe_cost.py
	$(BIN)/python benchmarks/observe_scrape.py

demo: install
	$(BIN)/python tools/train_demo.py
	$(BIN)/python tools/eval_demo.py --write-card

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
