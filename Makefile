# `make demo` and `make test` need nothing but make and Python 3.10 or later; each sets up what it uses.
PYTHON ?= python3
PY := .venv/bin/python

# The models are tiny: a second thread costs more than it brings, on a busy machine very much more.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# A thousand processes import the same files: the first one that needs a file compiles it, pip would compile them all.
export PYTHONDONTWRITEBYTECODE =
.PHONY: demo demo-compile lint test check test-all oldest matrix distributed from-pretrained adapters architectures image-models stacks verify torture bench bench-eager docs figures new-patch upstream mutants gpu gpu-wheels newest replay sources pythons release-check soak readme venv clean
.NOTPARALLEL:

demo: .venv/.demo  ## the same program without the plugin and with it, the difference in figures; two minutes
	$(PY) examples/demo.py

demo-compile: .venv/.demo .bnb/0.49.2  ## 4-bit QLoRA, compiled cold, on the last release that cannot do it alone
	PYTHONPATH=.bnb/0.49.2 $(PY) examples/qlora_compile.py

lint: .venv/.dev  ## the rules of style and the types that pyproject.toml states
	$(PY) -m nox --session lint

test: .venv/.test  ## the contract of each patch, the engine, a user's program for each group, each program of harm; minutes
	$(PY) -m nox --session tests

check: .venv/.dev  ## rules of style, the rest of the suite, and what three older bitsandbytes and two older stacks can change
	$(PY) -m nox --session ready check older

test-all: .venv/.dev  ## everything, against every release that a patch was written for: before a release; TESTS as for upstream
	$(PY) -m nox --session tests_all
	-$(PY) -m tools.mutants --sample 10 --seed $$(date +%j)  # what lives is printed: a test to write, no failure
	$(foreach folder,$(TESTS),$(PY) -m tools.upstream $(folder) &&) true

oldest: .venv/.dev  ## the oldest transformers, peft and accelerate that are supported
	$(PY) -m nox --session oldest

matrix: .venv/.dev  ## harm: each change of a layer's state x each reader of it, as is and patched; an hour. MATRIX="--slice"
	PATCHES_AUTOLOAD=0 $(PY) -m tests.harm.matrix --alone --counts $(MATRIX)

distributed: .venv/.dev  ## training and checkpoints on 1, 2 and 3 ranks, against one process; CELLS="train/fsdp2"
	$(PY) -m tests.distributed $(CELLS)

from-pretrained: .venv/.dev  ## requests to from_pretrained x models x checkpoints, by the rules of docs/from_pretrained.md, on five releases of transformers; hours, FROM_PRETRAINED="--some 80" minutes
	$(PY) -m tests.from_pretrained $(FROM_PRETRAINED)
	$(PY) -m tests.from_pretrained.releases $(FROM_PRETRAINED)

adapters: .venv/.dev  ## each option of each adapter of peft on quantized layers, beside nn.Linear; half an hour. ADAPTERS="LoraConfig int8" or "--unpatched"
	PATCHES_AUTOLOAD=0 $(PY) -m tests.adapters $(ADAPTERS)

architectures: .venv/.dev  ## each architecture of transformers in 4 bits and INT8, into docs/architectures.json; an hour, goes on where it was; ARCHITECTURES="speech"
	PATCHES_AUTOLOAD=0 $(PY) -m tests.architectures $(ARCHITECTURES)

image-models: .venv/.dev  ## each model of diffusers in 4 bits and INT8, into docs/image_models.json; an hour, goes on where it was; IMAGE_MODELS="Flux"
	PATCHES_AUTOLOAD=0 $(PY) -m tests.image_models $(IMAGE_MODELS)

stacks: .venv/.dev  ## reproducers and main flows on each stack that people are pinned to; TORCH=2.8.0 with that torch, STACKS="newest"
	$(PY) -m tools.stacks $(STACKS)

verify: .venv/.dev  ## each patch: is the defect there without it, gone with it, back after revert
	$(PY) -m patches verify

torture: .venv/.dev  ## an error at every step of apply and revert, over the whole registry; takes hours, EVERY=10 one step in ten, VERB=revert
	PATCHES_AUTOLOAD=0 PATCHES_TEST_PROCESSOR=plain $(PY) -m tests.engine.torture --every $(or $(EVERY),1) $(if $(VERB),--verb $(VERB))

bench: .venv/.bench  ## step times, first calls and memory, side by side, and the pictures of all results; arguments in BENCH="..."
	$(PY) -m benchmarks $(BENCH)
	$(PY) -m benchmarks.plots

upstream: .venv/.dev  ## bitsandbytes' or peft's own CPU tests without the plugin and with it; TESTS=<the folder tests of a checkout>
	$(PY) -m tools.upstream $(TESTS)

mutants: .venv/.dev  ## a piece out of each patch, one at a time: which its own tests do not see; IDS="ID ...", SAMPLE=5
	$(PY) -m tools.mutants $(IDS) $(if $(SAMPLE),--sample $(SAMPLE))

gpu-wheels: .venv/.dev  ## what a machine with a GPU and no network needs for `make gpu`, in .gpu/wheels; WHEELS="--cuda 128"
	$(PY) -m tools.gpu.wheels $(WHEELS)

gpu:  ## on a machine with CUDA, with its own stack, in nine minutes, without a network: results in build/gpu; GPU="--minutes 5 smoke training"
	$(PYTHON) -m tools.gpu $(GPU)

bench-eager: .venv/.bench  ## what the patches cost in eager: steps, products, saved bytes, calls; three minutes on an idle machine
	$(PY) -m benchmarks.eager $(BENCH)

soak: .venv/.dev  ## patches in and out for minutes: memory and caches must stay flat; SOAK="--rounds 1000 --steps 0"
	$(PY) -m benchmarks.soak $(SOAK)

newest: .venv/.dev  ## the newest of everything: what has changed, which patch no longer fits; raises tested_up_to of the others. ONLY="torch==2.13.0" holds back, DRY=1 changes no file
	$(PY) -m nox --session newest -- $(ONLY) $(if $(DRY),--dry-run)

replay: .venv/.dev  ## each past release as if it were tomorrow's: what would be applied, and whether it holds; two hours, goes on where it was
	PATCHES_AUTOLOAD=0 $(PY) -m tools.replay.verified
	PATCHES_AUTOLOAD=0 $(PY) -m tools.replay

sources: .venv/.dev  ## the table of the sources that patches rest on, in patches/newer_releases/sources.json; reads wheels, minutes
	PATCHES_AUTOLOAD=0 $(PY) -m tools.sources

pythons: .venv/.dev  ## what needs no torch, on Python 3.10, 3.12 and 3.13, which must be on the path, and 3.14, which needs node
	$(PY) -m nox --session pythons wasm

release-check: .venv/.dev  ## wheel, sdist, README and every Python, on a clean clone of the last commit; CHECKS="build readme"
	$(PY) -m tools.release_check $(CHECKS)

new-patch: .venv/.dev  ## the skeleton of a patch and of its tests; ID=package-what-goes-wrong; IN=int8 if it asks for a folder
	$(PY) -m tools.new_patch $(ID) $(if $(IN),--inside $(IN))

docs: .venv/.dev  ## the site, in build/docs/html: a page for each patch, warnings are errors
	$(PY) -m nox --session docs

figures: .venv/.dev  ## what verify measures for the site, in docs/figures.json: of each reproducer that has changed
	$(PY) -m nox --session figures

readme: .venv/.dev  ## bring the patch table of README.md up to date
	$(PY) -m tools.readme

venv: .venv/.dev

# One environment; the stamp says which of the extras it holds. With -qq pip prints errors only: setuptools warns of
# every editable installation.
.venv/.%: pyproject.toml constraints.txt | .venv/bin/python
	$(PY) -m pip install -qq --no-compile --constraint constraints.txt --editable '.[$*]'
	@touch $@

# The pip that Python brings takes twice as long to find what to install.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "bnb-patches needs Python 3.10 or later; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --constraint constraints.txt --upgrade pip

.bnb/%: | .venv/bin/python
	$(PY) -m pip install --quiet --no-compile --no-deps --target $@ bitsandbytes==$*

clean:
	rm -rf .venv .bnb .stacks .nox .gpu .replay .wheels build docs/generated docs/patches dist *.egg-info .mypy_cache .pytest_cache
