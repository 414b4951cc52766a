# SPDX-License-Identifier: Apache-2.0
# Every target works on a bare clone: it makes .venv and installs the pinned packages first.
#   make serve ARGS="--port 31000"    arguments go to the server
#   make test ARGS="-k planes"        arguments go to pytest
#   make test SGLANG=0.5.23           another supported SGLang, in an environment of its own
#   make test-versions                all tests on each
# The SGLang that is verified on GPUs too.
DEFAULT_SGLANG := 0.5.17
OTHER_SGLANG := 0.5.23
# The newest one is served, unless an NVIDIA GPU is there.
SERVED_SGLANG := $(if $(shell command -v nvidia-smi 2> /dev/null),$(DEFAULT_SGLANG),$(OTHER_SGLANG))
SGLANG ?= $(if $(filter serve,$(MAKECMDGOALS)),$(SERVED_SGLANG),$(DEFAULT_SGLANG))
VENV := $(if $(filter $(SGLANG),$(DEFAULT_SGLANG)),.venv,.venv-$(SGLANG))
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PACKAGES := install --quiet --editable '.[dev]' 'sglang==$(SGLANG)'
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install serve test test-versions test-unit test-e2e test-alone lint format bench loadtest gpu-check docs schema clean

help:
	@echo "make serve | test | lint | format | bench | loadtest | gpu-check | docs | schema | clean"

install: $(STAMP)

# By uv, or, where it reaches no index, by pip, which has a configuration of its own.
$(STAMP): pyproject.toml
	@test -x $(PY) || { \
	  for py in $(PYTHON) python3.11 python3.12 python3; do \
	    "$$py" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null \
	      && { "$$py" -m venv $(VENV); exit; }; \
	  done; \
	  echo "error: no Python 3.11 or 3.12 found; install one or set PYTHON=/path/to/python" >&2; exit 1; }
	$(PY) -m pip install --quiet uv==0.13.9 && UV_COMPILE_BYTECODE_TIMEOUT=600 \
	  $(PY) -m uv pip $(PACKAGES) --system-certs --compile-bytecode || $(PY) -m pip $(PACKAGES)
	@touch $@

serve: $(STAMP)
	$(PY) -m sglang_sparse.serve_reference $(ARGS)

# Side by side on two cores; the servers that tests share take the longer half.
# With ARGS that select tests of one part alone, the others may find none (status 5).
SIDE_BY_SIDE = $(MAKE) --no-print-directory -j2 --output-sync=target SGLANG=$(SGLANG)

test: $(STAMP)
	@$(SIDE_BY_SIDE) test-e2e test-unit test-alone

# The long parts first, so that both cores end together; the second of them installs the other
# version's environment.
test-versions: $(STAMP)
	@$(SIDE_BY_SIDE) test-e2e other-e2e other-unit test-alone other-alone test-unit

# Parts that run side by side do not install side by side.
other-%:
	@flock Makefile $(MAKE) --no-print-directory SGLANG=$(OTHER_SGLANG) install
	@$(MAKE) --no-print-directory SGLANG=$(OTHER_SGLANG) test-$*

test-e2e: WHICH := tests/e2e
test-unit: WHICH := tests/unit tests/start --sglang used
# Tests whose files do not reach SGLang; they run where it cannot be imported.
test-alone: WHICH := tests/unit --sglang unused
test-e2e test-unit test-alone: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(WHICH) -m "not gpu" $(ARGS) || test "$$?$(if $(ARGS),ok)" = 5ok

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest --quiet tests/unit/test_sizes.py tests/unit/test_rooms.py

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(STAMP)
	$(PY) kernels/bench/bench.py $(ARGS)

loadtest: $(STAMP)
	$(PY) loadtest/short.py $(ARGS)

gpu-check: $(STAMP)
	$(PY) tests/gpu $(ARGS)

# The site, in build/docs; a broken link ends it.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --clean --config-file docs/mkdocs.yml
	@echo "built build/docs; to read it: $(PY) -m http.server --directory build/docs 8000"

# What is generated from the code: configs/schema.json, and tables of docs/.
schema: $(STAMP)
	$(PY) -m sglang_sparse.cli schema --write
	$(PY) docs/generate.py

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
