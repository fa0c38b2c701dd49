# `make run` runs the study, `make test` the tests. Each sets up the environment first, once; `make setup` does that alone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
CLIENTS := $(VENV)-clients

# The set-up compiles no bytecode, the first import does. With this variable each process would compile all anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run test clients tools bench docs links lint ui lock clean

setup: $(READY)  ## set up the environment alone

run: $(READY)  ## run the study that params.yaml describes
	$(BIN)/python -m flows run

test: $(READY)  ## run all tests
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

clients: tools  ## try tools of others on compressed models: a minute
	$(CLIENTS)/bin/python -m pytest tests/clients

# transformers.js is tried where npm is.
tools: $(CLIENTS)/ready $(CLIENTS)/optimum $(if $(shell command -v npm),$(CLIENTS)/node_modules)  ## install tools of others beside the environment

bench: $(READY)  ## measure the study of this folder and write docs/results/benchmarks.md: some minutes, alone on the machine
	$(BIN)/python -m flows run
	$(BIN)/python -m benchmarks > docs/results/benchmarks.md.new
	mv docs/results/benchmarks.md.new docs/results/benchmarks.md

docs: $(READY)  ## build the pages into site/; a dead link, a long sentence and a misspelled word are errors
	$(BIN)/python -m tasks.config.reference > docs/reference/params.md
	$(BIN)/python -m docs.command_line > docs/reference/cli.md
	$(BIN)/python -m docs.prose
	rm -rf site
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env -c docs -d build/docs . site

links: $(READY)  ## ask the network for every address that a page names
	$(BIN)/sphinx-build --quiet -b linkcheck -c docs -d build/docs . build/links

lint: $(READY)  ## check formatting, style, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

ui: $(READY)  ## serve the pages of Prefect and MLflow on this machine only
	$(BIN)/python -m flows ui

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 …")'
	@echo 'Setting up $(VENV): half a minute to three minutes, once.'
	$(PYTHON) -m venv $(VENV)
	@# Four at a time, 24 packages each: a single pip takes seven times as long. From z to a, so that torch is not the last.
	sort -r requirements.lock \
		| xargs -P 4 -n 24 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@# The lock names what torch's build for CPUs needs. The one for GPUs needs CUDA packages as well.
	$(BIN)/python -c 'import torch' 2> /dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	touch $@

$(CLIENTS)/ready: $(READY) requirements-clients.lock
	$(PYTHON) -m venv --without-pip $(CLIENTS)
	@# It sees the packages of $(VENV).
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
		$$($(CLIENTS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/environment.pth
	$(BIN)/python -m pip --python $(CLIENTS)/bin/python install --quiet --disable-pip-version-check --no-deps \
		--requirement requirements-clients.lock --editable .
	touch $@

$(CLIENTS)/optimum: $(READY) requirements-optimum.lock
	@# It needs transformers 4, so it goes where only its own test looks.
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $@ \
		--requirement requirements-optimum.lock

$(CLIENTS)/node_modules: tests/clients/package-lock.json
	mkdir -p $(CLIENTS)
	cp tests/clients/package.json tests/clients/package-lock.json $(CLIENTS)
	@# Without scripts, one of which would fetch CUDA libraries.
	npm ci --prefix $(CLIENTS) --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

lock:  ## resolve the version ranges of pyproject.toml into requirements.lock and requirements-clients.lock, and of optimum-onnx
	$(PYTHON) -m venv $(VENV)-lock
	@# For Debian 12 with Python 3.11.2: later versions of soupsieve need 3.11.5, and redis needs async-timeout.
	$(VENV)-lock/bin/python -m pip install --quiet torch==2.13.0 'soupsieve<3' async-timeout '.[pipeline,onnx,cluster,team,lm-eval,docs,dev]'
	$(VENV)-lock/bin/python -m pip freeze --all --exclude eckart --exclude pip | sed 's/+cpu$$//' > requirements.lock
	$(VENV)-lock/bin/python -m pip install --quiet '.[clients]'
	$(VENV)-lock/bin/python -m pip freeze --all --exclude eckart --exclude pip | sed 's/+cpu$$//' \
		| grep --invert-match --line-regexp --fixed-strings --file requirements.lock > requirements-clients.lock
	$(VENV)-lock/bin/python -m pip install --quiet optimum-onnx
	$(VENV)-lock/bin/python -m pip freeze --all --exclude eckart --exclude pip | sed 's/+cpu$$//' | grep --invert-match --line-regexp \
		--fixed-strings --file requirements.lock --file requirements-clients.lock > requirements-optimum.lock
	rm -rf $(VENV)-lock

clean:  ## remove the environment and tool caches; keep data, models and reports
	rm -rf $(VENV) $(VENV)-lock $(CLIENTS) build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
