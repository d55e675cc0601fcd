# Handles of the project; everything runs in .venv, which `make install` creates.
PYTHON ?= python3
BIN := .venv/bin
# Tests mostly wait for servers; two at a time use two cores. A module's fixtures stay in one worker.
WORKERS := -n 2 --dist loadscope
STAMP := .venv/.installed

.PHONY: install demo test test-all lint format crash bench native real docs

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev,demo]'
	$(BIN)/python -m tools.demo.model
	touch $(STAMP)

demo: install
	$(BIN)/python run_agent.py demo $(if $(CHECK),--check)

test: install
	$(BIN)/python -m pytest $(WORKERS) -m 'not slow'

test-all: install
	$(BIN)/python -m pytest $(WORKERS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

crash: install
	$(BIN)/python -m tests.crash $(if $(NESTED),--nested $(NESTED))
	$(BIN)/python -m tests.crash --real

bench: install
	$(BIN)/python benchmarks/client_rate.py --check
	$(BIN)/python benchmarks/judge.py --check
	$(BIN)/python benchmarks/answers.py --check
	$(BIN)/python benchmarks/search.py --check
	$(BIN)/python benchmarks/overhead.py --check
	$(if $(REAL),$(BIN)/python benchmarks/real_night.py --check)
	$(if $(REAL),$(BIN)/python benchmarks/search_live.py --check)

native: install
	sh scripts/build-llama-server.sh
	RATCHET_LLAMA_SERVER=.cache/llama-server/llama-server $(BIN)/python -m pytest -m real -k native

# A real vLLM and real benchmark clients: half an hour and 7 GB the first time.
REAL := $(CURDIR)/.cache/real
real: export RATCHET_VLLM := $(REAL)/vllm/bin/vllm
real: export RATCHET_VLLM_MODEL := $(REAL)/model
real: export RATCHET_BENCH_TOKENIZER := $(REAL)/model
real: export RATCHET_BENCH_SGLANG := $(REAL)/sglang/bin/python $(REAL)/sglang/bench_serving.py
real: export RATCHET_BENCH_VLLM := $(REAL)/vllm/bin/vllm bench serve
real: export RATCHET_BENCH_GUIDELLM := $(REAL)/guidellm/bin/guidellm run
real: export RATCHET_BENCH_AIPERF := $(REAL)/aiperf/bin/aiperf profile
real: install
	sh scripts/install-real-engines.sh
	$(BIN)/python -m pytest tests/tools/test_benches_real.py tests/tools/test_servers_vllm_live.py tests/e2e/test_real_vllm.py

docs: install
	$(BIN)/python docs/generate.py
