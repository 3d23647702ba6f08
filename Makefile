# Two commands do everything on a fresh machine with Python and make: `make quickstart` and `make test`.
#
# torch comes from pip's default index. For a CPU or a particular CUDA build of it:
#     make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
RELEASES ?= 5.0.0 5.9.0 5.17.0 newest
COMPAT_FLAGS ?=

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check

.PHONY: quickstart test test-slow compat lint clean

quickstart: $(VENV)/installed  ## train on the embedded grammar, measure, translate: some five minutes
	$(RUN) scripts/quickstart.py

test: $(VENV)/installed-dev  ## all tests but the slow ones
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(RUN) -m pytest -n auto -m "not slow"

test-slow: $(VENV)/installed-dev  ## the tests that train for minutes
	$(RUN) -m pytest -m slow

compat: $(VENV)/installed-dev  ## a checkpoint to and fro between releases of transformers, each in its own environment
	TORCH_INDEX=$(TORCH_INDEX) $(RUN) tests/compatibility/run.py $(RELEASES) $(COMPAT_FLAGS)

lint: $(VENV)/installed-dev  ## format, lint, types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

clean:  ## environments and caches; trained models in runs/ stay
	rm -rf $(VENV) .compat .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch first and by its exact version: a range would let pip pick a newer and larger build.
$(VENV)/torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing $$(grep '^torch==' constraints.txt) and the rest of constraints.txt; the first time takes minutes."
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' constraints.txt)
	touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	$(PIP) -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/torch pyproject.toml
	$(PIP) -c constraints.txt -e ".[dev,plot]"
	touch $@
