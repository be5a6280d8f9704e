# `make demo` trains a small model on real conversations; `make test` runs the test suite; `make lint` checks style.
# All of them share the environment .venv, made on first use and again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hf_megapack
SMOLLM2 := $(CACHE)/smollm2-135m-instruct
# A hub id or a folder; the default is made from a PyPI package.
MODEL ?= $(SMOLLM2)
OUTPUT ?= outputs/demo
THREADS ?= $(shell nproc)
# Processes that run tests, one thread each and a file at a time; `make test WORKERS=0 ARGS='-x --pdb -k rows'` starts none.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint clean

help:
	@sed -n '1,2s/^# //p' Makefile

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is older than Python 3.11: name a newer one, as in 'make demo PYTHON=python3.12'." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make virtual environments. On Debian: apt-get install python3-venv" >&2; exit 1; }
	@rm -f $@
	@echo 'Installing into $(VENV), which takes several minutes the first time.'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo,test,lint]'
	@touch $@

setup: $(READY)

$(SMOLLM2): | $(READY)
	$(BIN)/python examples/smollm2.py $@

demo: $(READY) | $(filter $(SMOLLM2),$(MODEL))
	$(BIN)/accelerate launch --config_file examples/accelerate_cpu.yaml --num_cpu_threads_per_process $(THREADS) \
	    examples/sft.py --config examples/sft.yaml --model $(MODEL) --output_dir $(OUTPUT)
	$(BIN)/python examples/check_adapter.py $(OUTPUT) --dataset examples/data/held_out.jsonl

test: export HF_HUB_OFFLINE = 1
test: export HF_DATASETS_OFFLINE = 1
test: export TOKENIZERS_PARALLELISM = false
test: export OMP_NUM_THREADS = 1
test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/flake8 hf_megapack examples benchmarks docs

clean:
	rm -rf $(VENV) outputs
