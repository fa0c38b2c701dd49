# Everything starts from here: `make run`, `make test`. Both set up the environment first, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

# The set-up leaves bytecode to the first import: where none is written, each process compiles anew all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test bench docs lint ui lock clean

run: $(READY)  ## run the study that params.yaml describes
	$(BIN)/python -m flows run

test: $(READY)  ## all tests
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

bench: $(READY)  ## time the study of this folder, alone on the machine, and write docs/benchmarks.md; some minutes
	$(BIN)/python -m flows run
	$(BIN)/python -m benchmarks > docs/benchmarks.md.new
	mv docs/benchmarks.md.new docs/benchmarks.md

docs: $(READY)  ## the pages and the API reference, into site/index.html; a link that leads nowhere ends it
	rm -rf site
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env -c docs -d build/docs . site

lint: $(READY)  ## formatting, style, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

ui: $(READY)  ## Prefect's and MLflow's pages, on this machine alone
	$(BIN)/python -m flows ui

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 …")'
	@echo 'Setting up $(VENV): half a minute to three minutes, once.'
	$(PYTHON) -m venv $(VENV)
	@# Four at a time, 24 packages each: one pip for all takes seven times as long.
	xargs -P 4 -n 24 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile < requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

lock:  ## resolve pyproject.toml's ranges anew into requirements.lock
	$(PYTHON) -m venv $(VENV)-lock
	@# Debian 12 has Python 3.11.2: soupsieve's later versions want 3.11.5, and redis wants async-timeout there.
	$(VENV)-lock/bin/python -m pip install --quiet torch==2.13.0 'soupsieve<3' async-timeout '.[pipeline,onnx,cluster,team,lm-eval,docs,dev]'
	$(VENV)-lock/bin/python -m pip freeze --all --exclude eckart --exclude pip | sed 's/+cpu$$//' > requirements.lock
	rm -rf $(VENV)-lock

clean:  ## the environment and tool caches; data, models and reports stay
	rm -rf $(VENV) $(VENV)-lock build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
