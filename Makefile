# Two commands matter: `make serve` and `make test`. Both work from a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS   ?=

.PHONY: install native serve test test-clients test-asan fuzz chaos chaos-long check fix bench demo clean help
.DEFAULT_GOAL := help

help:
	@echo "make serve   start the server with the embedded model (ARGS='--port 9000')"
	@echo "make test    install the test extras and run every test"
	@echo "make test-clients   every client library and benchmark tool that is known to work (3 GB)"
	@echo "make fuzz    random cases that nobody has tried, MINUTES=60 (or HOURS=8)"
	@echo "make chaos   faults under load, and what held (at most 20 minutes); make chaos-long: more"
	@echo "make test-asan   the kernel tests with sanitizers"
	@echo "make check   format, lint, types, import contracts"
	@echo "make native  build the C++ kernels again after a change in csrc/"
	@echo "make fix     reformat and apply safe fixes"
	@echo "make bench   how fast engine, kernels, scheduler and start are, and what watching costs"
	@echo "make demo    train the embedded model again (under an hour on two cores)"

$(VENV)/.python: 
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# PyTorch first, on its own: nothing that follows can then pull another build.
$(VENV)/.torch: $(VENV)/.python constraints.txt
	@echo "installing PyTorch (about 200 MB, once)"
	@$(PIP) $$(grep '^torch==' constraints.txt)
	@touch $@

KERNELS := $(wildcard csrc/*.cpp csrc/*.h) csrc/CMakeLists.txt

$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(KERNELS)
	@echo "installing quire and compiling its kernels (some minutes)"
	@$(PIP) -e '.[bench]'
	@$(BIN)/python -m quire.kernels.compiled
	@touch $@

# In one go with quire itself: a second one would compile the kernels again.
$(VENV)/.test: $(VENV)/.torch pyproject.toml $(KERNELS)
	@echo "installing quire, the test and check tools, and compiling the kernels (some minutes)"
	@$(PIP) -e '.[test,dev]'
	@$(BIN)/python -m quire.kernels.compiled
	@touch $(VENV)/.installed $@

install: $(VENV)/.installed

# The kernels alone, into the source tree: what to run after a change in csrc/. Whatever else is
# installed stays as it is, unless pyproject.toml has changed.
native:
	@test $(VENV)/.test -nt pyproject.toml || $(MAKE) $(VENV)/.test
	@$(BIN)/cmake -S csrc -B build/native -G Ninja -DQUIRE_INPLACE=ON \
	  -DQUIRE_REQUIRE_NATIVE=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) >/dev/null
	@$(BIN)/cmake --build build/native
	@touch $(VENV)/.installed $(VENV)/.test

serve: install
	@$(BIN)/quire serve $(ARGS)

# Two processes: the tests that start servers in one, all others in the other (tests/conftest.py).
TEST_PROCESSES ?= 2
test: $(VENV)/.test
	@$(BIN)/python tools/get_prometheus.py $(VENV)/prometheus
	@$(BIN)/python tests/clients/environments.py openai-2 anthropic
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadscope $(ARGS)

# Each in an environment of its own in build/clients, with the versions of tests/clients/environments.
# PEER_VLLM=PYTHON adds `vllm bench serve`.
test-clients: $(VENV)/.test
	@$(BIN)/python tests/clients/environments.py
	QUIRE_ALL_CLIENTS=1 $(if $(PEER_VLLM),QUIRE_PEER_VLLM=$(PEER_VLLM)) \
	  $(BIN)/python -m pytest tests/clients $(ARGS)

# Random rounds of tests/fuzz (tests/fuzz/fuzz_kit.py); `make test` runs a fixed few of its cases.
fuzz: $(VENV)/.test
	@$(BIN)/python tests/fuzz/rounds.py $(if $(MINUTES),--minutes $(MINUTES)) \
	  $(if $(HOURS),--hours $(HOURS)) $(ARGS)

# Every fault of tests/chaos/faults.py against a server of its own; ARGS='F1 F3' picks some. The
# exit code is 1 if one does not hold that is promised to. The simulation plays schedules of deaths
# and lost messages on a clock of its own. chaos-long also has the soaks of tests/chaos/soaks.py
# (ARGS='S1' picks one; it takes hours in all) and a million requests (tests/chaos/soak.py).
chaos: $(VENV)/.test
	$(BIN)/python tests/chaos/simulation.py --schedules 500
	$(BIN)/python tests/chaos/drill.py --size usual --json build/chaos.json $(ARGS)

chaos-long: $(VENV)/.test
	$(BIN)/python tests/chaos/simulation.py --schedules 20000
	$(BIN)/python tests/chaos/soak.py --json build/chaos-soak.json
	$(BIN)/python tests/chaos/drill.py --size long --json build/chaos-long.json $(ARGS)

ASAN_TESTS := tests/kernels/test_sanitizers.py tests/kernels/test_pool.py \
  tests/kernels/test_native_*.py tests/kernels/test_kv_types.py tests/invariance/test_fused_decoder.py \
  tests/invariance/test_decode_at_once.py

# The kernels with address and undefined-behaviour sanitizers run the kernel tests, in the instruction
# sets that this machine has. What a sanitizer says must not be captured: it ends the process. Python has no C++
# library of its own, and the sanitizer looks for one when it starts, to follow exceptions.
HERE := from quire.kernels.compiled import lib; print(*lib.isas(), sep=';')
test-asan: $(VENV)/.test
	@$(BIN)/cmake -S csrc -B build/asan -G Ninja -DQUIRE_SANITIZE=ON -DQUIRE_REQUIRE_NATIVE=ON \
	  -DQUIRE_SANITIZE_ISAS="$$($(BIN)/python -c "$(HERE)")" \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) >/dev/null
	@$(BIN)/cmake --build build/asan
	QUIRE_KERNELS_FILE=$$(echo $(CURDIR)/build/asan/_native*.so) QUIRE_KERNELS=native \
	  LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0 \
	  $(BIN)/python -m pytest --capture=sys $(or $(ARGS),$(ASAN_TESTS))

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# PEER_VLLM=PYTHON, PEER_OPENVINO=PYTHON and PEER_LLAMA=PYTHON add vLLM, OpenVINO and llama.cpp, from
# environments of their own, to the same runs.
SHAPE = qwen2.5-0.5b
bench: install
	$(BIN)/python benchmarks/make_model.py $(SHAPE) build/bench
	$(BIN)/quire bench engine --model build/bench/$(SHAPE)-random \
	  $(if $(PEER_VLLM),--peer-vllm $(PEER_VLLM)) $(if $(PEER_LLAMA),--peer-llama $(PEER_LLAMA)) \
	  $(if $(PEER_OPENVINO),--peer-openvino $(PEER_OPENVINO))
	$(BIN)/python benchmarks/cpu_kernels.py --shape $(SHAPE)
	$(BIN)/python benchmarks/cpu_leaves.py --shape $(SHAPE)
	$(BIN)/python benchmarks/scheduler_cost.py
	$(BIN)/python benchmarks/policies.py
	$(BIN)/python benchmarks/observe_cost.py
	$(BIN)/python benchmarks/startup.py

demo: install
	$(BIN)/python tools/train_demo.py
	$(BIN)/python tools/eval_demo.py --write-card
	for model in quire-demo quire-demo-draft quire-demo-lora; do $(BIN)/quire verify --write $$model; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
