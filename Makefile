# The set-up and the two commands of the README. `make help` lists them.

VENV ?= .venv
PYTHON ?=
ARGS ?=
TESTS ?= tests
# test files at once: one a core, four at most; where there is a GPU, which they share, all in one process
JOBS ?= $(if $(shell command -v nvidia-smi),0,$(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n : 4))))

ifeq ($(VENV),none)
RUN = $(or $(PYTHON),python3)
else
RUN = $(VENV)/bin/python
endif

.PHONY: help setup demo demo-compare demo-moe test clean
.DEFAULT_GOAL := help

help:
	@echo "make demo          set up, prepare real text, train a small GPT with a hybrid recipe, check and plot it"
	@echo "make demo-compare  the same run in bf16 beside it, both in one plot"
	@echo "make demo-moe      the same with a mixture of experts on two expert-parallel ranks"
	@echo "make test          set up, run every test (CPU and gloo; GPU tests where there is a GPU)"
	@echo "make setup         only the set-up: $(VENV) from requirements.lock, and the extension"
	@echo "make clean         remove runs/, data/demo, build/, compiled extensions and caches; $(VENV) stays"
	@echo ""
	@echo "PYTHON=/path/to/python3.12   the Python to make $(VENV) from"
	@echo "VENV=none                    use PYTHON (default python3) as it is, download nothing (CONTRIBUTING.md)"
	@echo "ARGS='...'                   passed on: make demo ARGS='--iterations 100', make test ARGS='-k recipe -x'"
	@echo "TESTS=tests/unit             which tests"
	@echo "JOBS=2                       test files at once (default: one a core, at most 4; 0, one process, where there is a GPU)"

setup:
	@VENV='$(VENV)' PYTHON='$(PYTHON)' bash scripts/setup_env.sh

demo: setup
	@$(RUN) scripts/demo.py $(ARGS)

demo-compare: setup
	@$(RUN) scripts/demo.py --compare $(ARGS)

demo-moe: setup
	@$(RUN) scripts/demo.py --model configs/models/moe_demo.yaml --recipe nvfp4_rowscaled_fprop_mxfp8_bwd --out runs/demo-moe $(ARGS)

test: setup
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) -m pytest $(TESTS) -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

clean:
	rm -rf runs data/demo build *.egg-info .pytest_cache megatron_hybrid/*.so
	rm -f $(VENV)/stamp-extension
	find megatron_hybrid patches scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
