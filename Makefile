# Everything a person or CI does here. `make` alone lists the targets.

PYTHON ?= python3
# If no interpreter is named and python3 is too old, later versions are tried.
OTHER_PYTHONS := $(if $(filter file,$(origin PYTHON)),python3.13 python3.12 python3.11 python3.14)
VENV ?= .venv
CLIENTS := .venv-clients
INSTALL_ARGS ?=
EXTRAS ?= dev
ARGS ?=

# The laboratory is a distribution of its own, in the same folder: pip must be given both.
comma := ,
LABORATORY := $(if $(filter dev lab,$(subst $(comma), ,$(EXTRAS))),-e src/quire_lab)
CONSTRAINTS := requirements/constraints.txt
CACHE := $(or $(QUIRE_CACHE),$(HOME)/.cache/quire)
PY := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
# Model and kernels lie in the cache, so their stamps hold for one cache only, and only while it is there.
CACHED := $(STAMPS)/cache$(subst /,_,$(abspath $(CACHE)))
# A compiler that comes later is a reason to compile.
KERNELS := $(CACHED).kernels-$(or $(notdir $(firstword $(shell command -v $(CXX) c++ g++ clang++ 2>/dev/null))),none)
KERNEL_SOURCES := $(shell find src/quire/kernels \( -name '*.cpp' -o -name '*.h' -o -name '*.hpp' \) 2>/dev/null) \
  $(wildcard src/quire/kernels/build.py)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := $(PY) -m pip --no-input
ifneq ($(filter true 1,$(CI)),)
  # No terminal, no prompts.
  export NO_COLOR := 1
  INSTALL_ARGS += --no-color --progress-bar off
  PYTEST_ARGS += --color=no
endif
# Two processes, each with whole files: most tests wait for one core, and a module's fixtures are made once.
JOBS ?= 2
RUN_TESTS = @$(PY) -m pytest -m $(1) -n $(JOBS) --dist loadfile --durations=10 --durations-min=1 $(PYTEST_ARGS) $(ARGS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup install browser serve chat test test-quick test-e2e test-clients check format site compare-cpu bench clean

help: ## list the targets
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "Variables: PYTHON=$(PYTHON) (3.11 or later), VENV=$(VENV), INSTALL_ARGS (for pip), EXTRAS=$(EXTRAS), ARGS (for pytest), JOBS=$(JOBS) (processes of pytest), QUIRE_CACHE=$(CACHE)"

setup: $(CACHED).model $(KERNELS) ## make .venv, install pinned packages, fetch the model, compile the kernels
	@$(if $(filter setup,$(MAKECMDGOALS)),echo "Set up. Next: make chat",:)

install: $(STAMPS)/packages ## only .venv and the pinned packages of EXTRAS, as the container image does

browser: $(STAMPS)/packages ## fetch a Chromium for the tests of the page: 100 MB of Debian's packages, without root
	@$(PY) tools/fetch_browser.py >/dev/null

serve: setup ## set up, then serve the built-in model on 127.0.0.1:8000
	@$(VENV)/bin/quire serve

chat: setup ## set up, then talk with the built-in model
	@$(VENV)/bin/quire chat

test: setup check test-quick test-e2e ## set up, then every check and every test, quick ones first

test-quick: setup ## the quick tests only; ARGS="-k word" narrows them
	@echo "== quick tests"
	$(call RUN_TESTS,"not e2e")

test-e2e: setup browser ## the end-to-end tests only
	@echo "== end-to-end tests"
	$(call RUN_TESTS,"e2e")

test-clients: setup $(CLIENTS)/.installed ## LlamaIndex, LiteLLM and other clients, in an environment of their own
	@echo "== clients"
	@QUIRE_PYTHON=$(abspath $(PY)) $(CLIENTS)/bin/python -m pytest --confcutdir=tests/clients \
	  --durations=10 --durations-min=1 $(PYTEST_ARGS) tests/clients $(ARGS)

check: $(STAMPS)/packages ## format, lint, types, imports, sizes, words, site: what to run before a commit
	@PY=$(PY) tools/check.sh

format: $(STAMPS)/packages ## rewrite the files as ruff wants them
	@$(PY) -m ruff check --quiet --fix --exit-zero src tests tools benchmarks examples
	@$(PY) -m ruff format src tests tools benchmarks examples

site: $(STAMPS)/packages ## build the documentation site into site/
	@PYTHONPATH=src NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

compare-cpu: setup ## measure Quire, OpenVINO GenAI and llama.cpp on this CPU, one after the other
	@$(PY) -m quire_lab.benchmarks.compare_cpu $(ARGS)

bench: setup ## measure this machine: startup, latency, throughput
	@for kind in startup latency throughput; do echo "== $$kind"; $(VENV)/bin/quire bench $$kind || exit 1; done

clean: ## remove caches and build outputs; .venv and the model stay
	@rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find src tests tools benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

# The stages of setup. Each leaves a stamp, so that what is done is not done again.

$(STAMPS)/venv:
	@for python in "$(PYTHON)" $(OTHER_PYTHONS); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  version=$$("$(PYTHON)" --version 2>/dev/null | head -n 1); \
	  echo "Quire needs Python 3.11 or later; $(PYTHON) is $${version:-not there}." >&2; \
	  echo "Install one, or name it: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi; \
	echo "== 1/4 $(VENV), with $$("$$found" --version)"; \
	"$$found" -m venv "$(VENV)"
	@mkdir -p $(STAMPS) && touch $@

# torch comes first and shows its progress: it is nearly all of the download. It is installed without
# build isolation and under the constraints, so that nothing can bring a second, larger build of it.
$(STAMPS)/packages: $(STAMPS)/venv pyproject.toml src/quire_lab/pyproject.toml $(CONSTRAINTS)
	@echo "== 2/4 packages, as $(CONSTRAINTS) pins them (the first time some minutes: torch is large)"
	@grep -qx "torch==$$($(PY) -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])' \
	  2>/dev/null)" $(CONSTRAINTS) || $(PIP) install $(INSTALL_ARGS) -c $(CONSTRAINTS) torch setuptools
	@echo "   the engine's other packages and those of $(EXTRAS), quietly"
	@$(PIP) install $(INSTALL_ARGS) --quiet -c $(CONSTRAINTS) setuptools
	@$(PIP) install $(INSTALL_ARGS) --quiet --no-build-isolation -c $(CONSTRAINTS) -e '.[$(EXTRAS)]' $(LABORATORY)
	@touch $@

$(CACHED).model: $(STAMPS)/packages
	@echo "== 3/4 the built-in model, into $(CACHE)"
	@$(PY) -m quire.weights.builtin
	@touch $@

$(KERNELS): $(STAMPS)/packages $(KERNEL_SOURCES)
	@echo "== 4/4 kernels for this CPU, into $(CACHE)"
	@$(PY) -c 'from quire.kernels.build import main; raise SystemExit(main())'
	@touch $@

$(CLIENTS)/.installed: requirements/clients.txt $(STAMPS)/venv
	@echo "== $(CLIENTS), as $< pins it: about 700 MB"
	@$(PY) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --no-input install $(INSTALL_ARGS) --quiet -r $<
	@touch $@

ifeq ($(wildcard $(CACHE)/*),)
.PHONY: $(CACHED).model $(KERNELS)
endif
