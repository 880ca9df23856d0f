# `make demo` and `make test` need nothing but make and Python 3.10 or later; each sets up what it uses.
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test test-all verify newest venv clean

demo: venv  ## INT8 LoRA with half of the layers offloaded: without the plugin, then with it
	OMP_NUM_THREADS=2 $(PY) examples/int8_offload_lora.py

test: venv  ## the suite, against four releases of bitsandbytes
	$(PY) -m nox --session tests

test-all: venv  ## the suite, against every release that a patch was written for
	$(PY) -m nox --session tests_all

verify: venv  ## each patch: is the defect there without it, gone with it, back after revert
	$(PY) -m patches verify

newest: venv  ## the newest releases of everything: which patch no longer fits
	$(PY) -m nox --session newest

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "bnb-patches needs Python 3.10 or later; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv .bnb .nox build dist *.egg-info .pytest_cache
