# Every target creates the virtual environment VENV and installs what it needs, once.
#
#   make test PACKAGE=dist/lightning_zero-0.1.0-*.whl   tests a wheel instead of this tree

VENV ?= .venv
PYTHON ?= python3
# The default is editable: changed Python files need no new installation.
PACKAGE ?= -e .
INSTALLED = $(if $(filter %.whl,$(PACKAGE)),$(wildcard $(PACKAGE)),$(PACKAGE))
ARGS ?=

BIN := $(VENV)/bin
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(shell find cpp/include cpp/src -type f)

# The isolated build takes its tools from the same list.
export PIP_CONSTRAINT := $(abspath constraints.txt)
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo simulated-device test test-slow test-lightning test-simulated test-cpp test-cpp-tsan mutants lint format docs wheel clean FORCE

help:
	@echo "demo       train GPT-2 with strategy=zero2_offload on two CPU ranks; ARGS=... adds overrides"
	@echo "test       fast tests; ARGS=... goes to pytest"
	@echo "test-slow  slow tests, and test-cpp-tsan"
	@echo "test-simulated  tests of the engine and the strategies on the simulated device; SCHEDULE=lazy, eager or random3"
	@echo "test-cpp   C++ tests, plain and with the address and undefined-behavior sanitizers; needs GoogleTest"
	@echo "test-cpp-tsan  C++ tests of what uses threads, with the thread sanitizer"
	@echo "test-lightning  Lightning's own tests with our strategies; LIGHTNING=folder of its repository, ARGS=... chooses"
	@echo "mutants    plant small errors in a copy of the package, each of which a test must notice; ARGS=... chooses some"
	@echo "lint       ruff, mypy, clang-format, codespell"
	@echo "format     rewrite files in the project's format"
	@echo "docs       build the documentation in site/; ARGS=serve shows it while it is written"
	@echo "wheel      build dist/*.whl and dist/*.tar.gz"
	@echo "clean      remove what builds and tests leave"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Holds PACKAGE; where it has changed, the other one is installed.
$(VENV)/.package: FORCE | $(BIN)/python
	@printf '%s\n' '$(INSTALLED)' | cmp -s - $@ || printf '%s\n' '$(INSTALLED)' > $@

$(VENV)/.installed-examples: $(BUILD_INPUTS) $(VENV)/.package | $(BIN)/python
	$(BIN)/pip install $(INSTALLED)[examples]
	touch $@

$(VENV)/.installed-dev: $(BUILD_INPUTS) $(VENV)/.package | $(BIN)/python
	$(BIN)/pip install $(INSTALLED)[examples,dev]
	touch $@ $(VENV)/.installed-examples

$(VENV)/.installed-docs: $(BUILD_INPUTS) $(VENV)/.package | $(BIN)/python
	$(BIN)/pip install $(INSTALLED)[docs]
	touch $@

demo: $(VENV)/.installed-examples
	$(BIN)/python examples/gpt2/train.py strategy=zero2_offload trainer=cpu trainer.devices=2 $(ARGS)

# Each worker has rank pools of its own; ranks that wait for each other leave their cores to other workers', of which
# there are three for two cores.
SIDE_BY_SIDE = --numprocesses $(shell expr 3 '*' $(JOBS) / 2) --dist worksteal

# Tests build it themselves where it is missing; here no time limit of a test counts the minute.
simulated-device: $(VENV)/.installed-dev
	$(BIN)/python tests/device/build.py

# The pytest command, not `python -m pytest`: the latter puts this folder on sys.path, where the sources
# would hide an installed wheel.
test: simulated-device
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "not slow and not gpu" $(ARGS)

# pytest exits with 5 when no test is marked slow.
test-slow: simulated-device test-cpp-tsan
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "slow and not gpu" $(ARGS) || [ $$? -eq 5 ]

# Tests of CPU ranks on the simulated device, whose schedule shows a missing wait as other numbers or an error. ARGS goes
# to pytest: `-m "not gpu"` adds the slow tests.
SCHEDULE ?= lazy
TESTS ?= tests/engine tests/strategy
test-simulated: simulated-device
	$(BIN)/pytest $(SIDE_BY_SIDE) --simulated $(SCHEDULE) -m "not slow and not gpu" $(TESTS) $(ARGS)

# Lightning's own tests, with our names in the place of its default. LIGHTNING is a copy of its repository at the version
# of constraints.txt; its tests need packages of its own (requirements/pytorch/test.txt).
test-lightning: $(VENV)/.installed-dev
	@test -d "$(LIGHTNING)" || { echo "make test-lightning LIGHTNING=folder of Lightning's repository"; exit 2; }
	$(BIN)/python -m benchmarks.lightning_suite $(LIGHTNING) $(ARGS)

# Builds the C++ tests in build/$(1) with the sanitizers $(2) and runs those whose names match $(3).
define run_cpp_tests
	$(BIN)/cmake -S . -B build/$(1) -DLIGHTNING_ZERO_TESTS=ON -DLIGHTNING_ZERO_SANITIZE=$(2)
	$(BIN)/cmake --build build/$(1) --parallel $(JOBS)
	$(BIN)/ctest --test-dir build/$(1) --output-on-failure --no-tests=error --parallel $(JOBS) -R '$(3)'
endef

ADDRESS_AND_UNDEFINED := address,undefined
test-cpp: $(VENV)/.installed-dev
	$(call run_cpp_tests,cpp,,.)
	$(call run_cpp_tests,cpp-asan,$(ADDRESS_AND_UNDEFINED),.)

# By default each process of the thread sanitizer sleeps for a second at its end.
test-cpp-tsan: export TSAN_OPTIONS := $(TSAN_OPTIONS) atexit_sleep_ms=0
test-cpp-tsan: $(VENV)/.installed-dev
	$(call run_cpp_tests,cpp-tsan,thread,ThreadPool|BindThreads|Parallel|Disk|Signal)

# -P: as above, this folder stays off sys.path.
mutants: simulated-device
	PYTHONPATH=tests $(BIN)/python -P -m mutants --jobs $(JOBS) $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find cpp tests/device/cpp -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/codespell

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find cpp tests/device/cpp -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format -i

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build)

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m build

clean:
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find lightning_zero conf tests examples -name __pycache__ -prune -exec rm -rf {} +
