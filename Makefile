# make demo    from a fresh clone to a trained, measured draft and its report
# make smollm2    a draft for SmolLM2-135M-Instruct, a real LLM, on two cores; another method: make smollm2 SMOLLM2=smollm2-glide
# make smollm2-bench    both methods' drafts for it, compared, and on prompts of 2k, 4k and 8k tokens
# make test    all tests that need neither a GPU nor a Slurm cluster; `make quick`: those of seconds
# make pythons   `make quick` on each Python from 3.11 to 3.13 that is found, in environments .venv-3.11 and so on, and the demo on the
#                newest, from nothing; others than those on PATH: make pythons PYTHONS=<folders that hold bin/ or <version>/bin/>
# make test-slurm   tests on a real Slurm that is brought up on this machine: Debian or Ubuntu, root; it installs Slurm's packages
# make gpu     on a machine with a GPU: its tests, steps against their floor, attention, decoding, the demo killed and resumed, in parts
#              that go on where they were stopped; one page of all. `make gpu-packages`: what it needs there beside torch, in .gpu/
# make test-serve   the demo's drafts in unmodified engines, each in an environment of its own (.venv-serve; vLLM's: 3.4 GB)
# make lint    style, types, the workflow's own lint; notes on rooms and files that have grown large
# make chaos MOMENTS=300   a small run of the whole graph, killed and damaged at so many random moments
#
# make status     all stages: steps, speed, time left, last checkpoint, Slurm job
# make preflight RUN=mine.yaml    on the cluster's nodes, in minutes: what a job of days needs; without RUN of the demo
# make resume     after the controlling Snakemake was killed: wait for its Slurm jobs, unlock, go on
#                 (CANCEL=1: cancel them; GONE=1: it ran on another machine and is gone for sure)
#
# make PYTHON=python3.12 ...                          another Python
# make PIP_ARGS='--extra-index-url <address>' ...     more options for pip, such as an index of CPU builds of torch

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
# What pip installs into vLLM's environment: vLLM for GPUs where nvidia-smi is there, else the one for processors.
SERVE ?= $(if $(shell command -v nvidia-smi 2> /dev/null || true),vllm==0.32.0,-r serve/vllm.txt)

# Whatever a tool caches or keeps for a moment stays inside the clone. HOME is left alone: pip's settings may lie there.
CACHE := $(CURDIR)/.cache
export XDG_CACHE_HOME := $(CACHE)
export PIP_CACHE_DIR := $(CACHE)/pip
export TMPDIR := $(CACHE)/tmp
CACHE_TMP := .cache/tmp
export HF_HOME := $(CACHE)/huggingface
export TORCH_HOME := $(CACHE)/torch
export TORCH_EXTENSIONS_DIR := $(CACHE)/torch_extensions
export TORCHINDUCTOR_CACHE_DIR := $(CACHE)/inductor
export TRITON_HOME := $(CACHE)
export TRITON_CACHE_DIR := $(CACHE)/triton
export MPLCONFIGDIR := $(CACHE)/matplotlib
# As root Python would write bytecode beside its own standard library.
export PYTHONDONTWRITEBYTECODE := 1
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: demo gpu gpu-packages smollm2 smollm2-bench test test-slurm test-serve engines serve quick pythons demo-anew lint chaos status preflight resume
.DELETE_ON_ERROR:

demo: $(VENV)/.stamp-train | $(CACHE_TMP)
	longspec train demo

# The run that is trained, a file of config/run/.
SMOLLM2 ?= smollm2-eagle3
# Two threads for what is timed: the target's forward is what both sides of a comparison wait for. Answers and states have two jobs
# each, which get more done side by side on half of the cores than one after the other on all of them.
HALF := $(shell n=$$(nproc); echo $$((n > 1 ? n / 2 : 1)))
SMOLLM2_THREADS := --set-threads evaluate=2 answer=$(HALF) build_states=$(HALF)

smollm2: $(VENV)/.stamp-train | $(CACHE_TMP)
	longspec train $(SMOLLM2) $(SMOLLM2_THREADS)

smollm2-bench: $(VENV)/.stamp-train | $(CACHE_TMP)
	snakemake final_draft compare bench --config 'runs=[smollm2-glide,smollm2-eagle3]' $(SMOLLM2_THREADS)
	@echo "Reports: results/compare/smollm2-glide_smollm2-eagle3.html, results/smollm2-glide/bench.html, results/smollm2-eagle3/bench.html"

# Many tests wait for jobs that they have started, so three at a time keep two cores busy.
PYTEST := OMP_NUM_THREADS=1 python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.stamp-dev | $(CACHE_TMP)
	$(PYTEST) -m "not slurm and not gpu and not serve"

test-slurm: $(VENV)/.stamp-dev | $(CACHE_TMP)
	python -m tests.slurm.cluster install
	trap 'python -m tests.slurm.cluster down' EXIT; python -m pytest -m slurm --durations=0

# One process an engine's file: two at a time, of a thread each.
test-serve: serve
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m serve

# torch and transformers are taken as they are there, so this installs nothing.
gpu:
	python benchmarks/gpu.py

gpu-packages: $(VENV)/.stamp-train
	python benchmarks/gpu_packages.py

# What its tests need: the engines and drafts for them. The tests of an engine that is missing skip themselves.
ENGINES := vllm llama.cpp openvino

engines: $(VENV)/.stamp-dev | $(CACHE_TMP)
	@for engine in $(ENGINES); do $(MAKE) .venv-serve/$$engine/.stamp || \
	  echo "$$engine cannot be installed here, for the reason above; its tests skip themselves."; done

serve: engines
	@! ls .venv-serve/*/.stamp > /dev/null 2>&1 || snakemake results/demo/sinkpi-slicing/final_draft/provenance.json \
	  results/served-eagle3/ttt/final_draft/provenance.json results/demo-dflash/blocks/base/draft/model.safetensors \
	  --config 'runs=[demo,serve/served-eagle3.yaml,demo-dflash]'

quick: $(VENV)/.stamp-dev | $(CACHE_TMP)
	$(PYTEST) -m "not slow and not slurm and not gpu and not serve"

# Of several of one version the first that runs: a shim of pyenv may lead nowhere.
PYTHONS ?=
space := $() $()
pythons: export SEARCHED := $(subst $(space),:,$(strip $(wildcard $(PYTHONS:%=%/bin) $(PYTHONS:%=%/*/bin)))):$(PATH)
pythons: | $(CACHE_TMP)
	@IFS=:; failed=; newest=; for version in 3.11 3.12 3.13; do \
	  for folder in $$SEARCHED; do python=$$folder/python$$version; "$$python" -c '' 2> /dev/null && break; python=; done; \
	  [ -n "$$python" ] || { echo "Python $$version: not found on PATH, nor under PYTHONS=$(PYTHONS)"; continue; }; \
	  echo "Python $$version: $$python"; newest="VENV=.venv-$$version:PYTHON=$$python"; \
	  $(MAKE) $$newest quick || failed="$$failed $$version"; \
	done; \
	[ -n "$$newest" ] || { echo "No Python from 3.11 to 3.13 was found: make pythons PYTHONS=<folders that hold them>"; exit 1; }; \
	$(MAKE) $$newest demo-anew || failed="$$failed demo"; \
	[ -z "$$failed" ] || { echo "Failed:$$failed"; exit 1; }

# In a copy, whatever this clone has made: a demo that is done would do nothing.
ANEW := .cache/$(VENV)-demo
demo-anew: $(VENV)/.stamp-train | $(CACHE_TMP)
	rm -rf $(ANEW)
	mkdir $(ANEW)
	cp -R Snakefile rules config profiles src $(ANEW)
	cd $(ANEW) && PYTHONPATH=$(CURDIR)/$(ANEW)/src longspec train demo

lint: $(VENV)/.stamp-dev | $(CACHE_TMP)
	ruff check .
	ruff format --check .
	mypy
	snakefmt --check Snakefile rules
	snakemake --lint
	python -m longspec.workflow.reference --check
	@python -m tests.sizes

# Its result is kept in benchmarks/results.
MOMENTS ?= 300

chaos: $(VENV)/.stamp-dev | $(CACHE_TMP)
	python -m tests.workflow.chaos --moments $(MOMENTS)

# Jobs inherit the environment: on a cluster's nodes what is only for a moment belongs on the node's own disk.
CLUSTER_ENV := env -u TMPDIR -u TORCH_EXTENSIONS_DIR -u TORCHINDUCTOR_CACHE_DIR -u TRITON_HOME -u TRITON_CACHE_DIR -u XDG_CACHE_HOME

status:
	@python -m longspec.cluster status

preflight:
	$(CLUSTER_ENV) snakemake --profile slurm preflight $(if $(RUN),--config run=$(RUN))

resume:
	$(CLUSTER_ENV) python -m longspec.cluster resume $(if $(CANCEL),--cancel) $(if $(GONE),--gone)

# A stamp is newer than what it was made from, so a second call installs nothing.
$(VENV)/.stamp-train: $(VENV)/bin/python pyproject.toml constraints.txt
	python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[train,track,dev]'
	@touch $@ $(VENV)/.stamp-train

# The builds of torchvision, torchaudio and torchcodec that an index serves may not fit a CPU's torch; transformers imports them
# wherever they are installed, and fails then. The engines do without.
define REMOVE_UNFIT
@for each in torchvision torchaudio torchcodec; do $(@D)/bin/python -c "import $$each" 2> /dev/null || \
  $(@D)/bin/python -m pip uninstall -q -y --disable-pip-version-check $$each 2> /dev/null; done
endef

# An engine by the name that evaluation.engine has.
.venv-serve/%/.stamp: serve/%.txt | $(CACHE_TMP)
	$(PYTHON) -m venv --clear .venv-serve/$*
	.venv-serve/$*/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -r $<
	$(REMOVE_UNFIT)
	@touch $@

.venv-serve/openvino/.stamp: serve/openvino-constraints.txt

# With the plugin by which vLLM loads GLIDE drafts.
.venv-serve/vllm/.stamp: serve/vllm.txt serve/vllm-constraints.txt plugins/vllm/pyproject.toml | $(CACHE_TMP)
	$(PYTHON) -m venv --clear .venv-serve/vllm
	.venv-serve/vllm/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) $(SERVE)
	.venv-serve/vllm/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) --no-deps -e plugins/vllm
	$(REMOVE_UNFIT)
	@touch $@

# A Unix socket's path holds 107 characters, and tools open theirs in TMPDIR.
$(VENV)/bin/python: | $(CACHE_TMP)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  echo "$(PYTHON) is missing or too old or too new: $$($(PYTHON) --version 2>&1). Python 3.11, 3.12 or 3.13 is needed: make PYTHON=python3.12 ..."; exit 1; }
	@[ "$$(printf %s '$(TMPDIR)' | wc -c)" -le 75 ] || echo "Warning: the path of this folder is long; move the clone if a socket's path is refused as too long."
	$(PYTHON) -m venv $(VENV)

$(CACHE_TMP):
	@mkdir -p $@
