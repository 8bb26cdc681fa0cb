# Two commands do everything on a fresh machine: `make train` and `make test`.

PYTHON ?= python3
NEWEST ?= $(firstword $(shell for python in $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) python3.12; do command -v $$python; done 2>/dev/null))
PYTEST := -m pytest -n 2
RUN := PYTHONPATH=. .venv/bin/python

.PHONY: train test test-full test-newest lint clean

train: .venv/installed
	$(RUN) -m recipes.pretrain --out runs/pretrain-$$(date +%Y%m%d-%H%M%S)

test: .venv/installed lint
	$(RUN) $(PYTEST)

test-full: .venv/installed lint
	$(RUN) $(PYTEST) -m "slow or not slow"

test-newest: .venv-newest/installed
	PYTHONPATH=. .venv-newest/bin/python $(PYTEST)

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

%/installed: pyproject.toml
	$(if $(filter .venv-newest,$*),$(if $(NEWEST),,$(error no Python 3.12 found: set NEWEST=/path/to/python3.12)))
	rm -rf $*
	$(if $(filter .venv-newest,$*),$(NEWEST),$(PYTHON)) -m venv $*
	$*/bin/python -m pip install --quiet --upgrade pip
	$*/bin/python -m pip install --quiet --editable '.[test,aot]'
	touch $@

clean:
	rm -rf .venv .venv-newest runs .pytest_cache .hypothesis .ruff_cache
