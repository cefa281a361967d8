# `make demo` runs a demonstration, `make test` everything that CI runs. The other targets are parts of them.
# Each target installs what it needs: Python packages in .venv, other tools in .tools.

.DEFAULT_GOAL := help
.PHONY: help demo demo-engine test quick test-kernels test-chart cluster-test test-nightly test-all check format lint types contracts chart docs reference proto proto-check proto-baseline pytest \
	bench bench-overhead bench-gpu bench-store bench-peer replay-all policies mixtures tiers peers tables conformance-live vllm-env demo-vllm test-vllm sglang-env test-sglang faults fuzz fuzz-core sim soak clean

PYTHON := .venv/bin/python
RUNTIME := .venv/kvplane-runtime
DEV := .venv/kvplane-dev
# Arguments for pytest: make pytest ARGS="tests/core -k sliding"
ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUNTIME)  ## four models through a service, live, and what the cache saves (a minute; no torch)
	@.venv/bin/kvplane demo

demo-engine: $(RUNTIME)  ## a small engine with real pages, compared with the same model without a cache (installs torch, 1 GB)
	@scripts/demo_engine.sh

# Types take one of two processors for two minutes: the tests begin meanwhile.
test: lint  ## what CI runs: all but nightly tests, and kernels and chart if their sources changed (tests/targets.py)
	@$(MAKE) --no-print-directory -j 2 contracts types proto-check pytest

check: lint types contracts proto-check  ## static checks: style, types, import contracts, the wire contract

lint: $(DEV)
	@echo "== ruff"
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m tests.bench.structure --lines

format: $(DEV)  ## fix what ruff can fix, and format the code
	@$(PYTHON) -m ruff check --fix-only .
	@$(PYTHON) -m ruff format .

types: $(DEV)
	@echo "== mypy --strict"
	@$(PYTHON) -m mypy

contracts: $(DEV)
	@echo "== import contracts"
	@.venv/bin/lint-imports --no-logo

proto-check: $(DEV)
	@echo "== buf lint, buf breaking against proto/baseline.binpb, generated code"
	@scripts/buf.sh lint
	@scripts/buf.sh breaking --against proto/baseline.binpb
	@$(PYTHON) scripts/gen_proto.py --check
	@$(PYTHON) -m scripts.gen_columns --check
	@$(PYTHON) scripts/gen_blocking.py --check

pytest: $(DEV)  ## run the tests; ARGS="tests/core -k sliding" selects some
	@echo "== pytest"
	@PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest $(ARGS)  # several hundred processes import the product

QUICK := tests/test_tidy.py tests/base tests/core tests/service \
	$(foreach slow,replay public_traces fuzz dashboard garbage,--ignore-glob='*/test_$(slow)*')

quick: $(DEV)  ## within a minute: style, the core and the service in process, with fewer examples
	@$(PYTHON) -m pytest -n 2 --dist loadfile --hypothesis-profile=quick $(QUICK)

# Left out of `make test` while their sources are what they were when they passed (tests/targets.py).
test-kernels: $(DEV)  ## the kernels; commit tests/passed.json with a change of them
	@$(PYTHON) -m pytest -n 2 -m "not nightly" $$($(PYTHON) -m tests.targets tests kernels)
	@$(PYTHON) -m tests.targets record kernels

test-chart: $(DEV)  ## the chart, by real Helm; commit tests/passed.json with a change of it
	@$(PYTHON) -m pytest -n 2 --dist loadfile $$($(PYTHON) -m tests.targets tests chart)
	@$(PYTHON) -m tests.targets record chart

# In namespaces of its own, on the context of KUBECONFIG that is named; never on the current one.
cluster-test: $(DEV)  ## the chart and the product on a real Kubernetes (CONTEXT=NAME IMAGE=REFERENCE WORKER_IMAGE=REFERENCE STORE_IMAGE=REFERENCE ONLY="load router")
	@$(PYTHON) -m tests.cluster --context "$(CONTEXT)" --image "$(IMAGE)" --worker-image "$(WORKER_IMAGE)" --store-image "$(STORE_IMAGE)" --only $(ONLY)

# `make test-nightly EXPLORE=N` repeats a failing property.
EXPLORE ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')

test-nightly: $(DEV)  ## what takes long: campaigns, planted faults, packaging, real processes; then every property with new examples (EXPLORE=N)
	@$(PYTHON) -m pytest $(ARGS) --all -m nightly
	@echo "== properties explored with EXPLORE=$(EXPLORE)"
	@$(PYTHON) -m pytest -n 2 --all -m "hypothesis and not nightly" --hypothesis-profile=explore --hypothesis-seed=$(EXPLORE)

test-all: check  ## every test in one run, except those of a real vLLM
	@$(PYTHON) -m pytest $(ARGS) --all -m "not sglang and not vllm"

proto: $(DEV)  ## regenerate the code after a change in proto/ or of kvplane/aio/unary.py
	@$(PYTHON) scripts/gen_proto.py
	@$(PYTHON) -m scripts.gen_columns
	@$(PYTHON) scripts/gen_blocking.py

chart: $(DEV)  ## regenerate the schema and the table of the chart's values after a change in helm/ or of a configuration key
	@$(PYTHON) scripts/chart.py

reference: $(DEV)  ## regenerate docs/reference after a change of proto comments, errors or configuration keys
	@$(PYTHON) -m scripts.reference

docs: $(DEV)  ## build the documentation site in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

proto-baseline:  ## accept the current contract as the baseline that later changes may not break
	@scripts/buf.sh build --exclude-source-info -o proto/baseline.binpb
	@git --no-pager diff --stat -- proto/baseline.binpb

bench: $(DEV)  ## steps in the steady state (full pool, events, steps in flight), what holds the loop, hashing, ns per block operation
	@$(PYTHON) -m tests.bench.steady
	@$(PYTHON) -m tests.bench.held
	@$(PYTHON) -m tests.bench.hashing
	@$(PYTHON) -m tests.bench

bench-store: $(DEV)  ## what a store costs a step, its size over a long run, and restarts with a million entries
	@$(PYTHON) -m tests.bench.restart
	@$(PYTHON) -m tests.bench.store_cost

bench-peer: $(DEV)  ## a step and an admission compared with vLLM 0.33.0, in one run; writes tests/bench/results (PEER="--quick")
	@$(PYTHON) -m tests.bench.peer $(PEER)

bench-gpu: $(DEV)  ## kernels on one GPU: checked, then measured against the limits of the machine; writes tests/bench/results
	@$(PYTHON) -m tests.bench.gpu

bench-overhead: $(DEV)  ## CPU time that the decision log, metrics and traces add to a step
	@$(PYTHON) -m tests.bench.overhead

conformance-live: $(DEV)  ## compare vLLM 0.33.0 and the core on random operations (a large download; LIVE="--kind hybrid --seeds 5"; CONFIGS=FOLDER: published config.json files too)
	@$(PYTHON) -m tests.conformance.live $(LIVE)
	@if [ -n "$(CONFIGS)" ]; then .tools/vllm/bin/python tests/vllm/published_plans.py "$(CONFIGS)" \
		&& $(PYTHON) -m tests.plan.published "$(CONFIGS)"; fi

# Runs of the simulation: number of seeds, first seed.
SEEDS ?= 200
SEED_BASE ?= 1
# Number of processes; empty: one per core.
JOBS ?=

tiers: $(DEV)  ## figures N1 to N10 of tiers with their goals, damaged slots, planted, simulated and real faults, an engine against its model (2 minutes on 2 quiet cores; REQUESTS=60 CASES=10000 SEEDS_OF_TIERS=8 FAULTS=12 MINUTES=30)
	@$(PYTHON) -m tests.bench.tier_goals --requests $(or $(REQUESTS),60) --cases $(or $(CASES),10000) --seeds $(or $(SEEDS_OF_TIERS),8) --faults $(or $(FAULTS),12) --minutes $(or $(MINUTES),30)

tables: $(DEV)  ## published results of a fleet with tiers, predicted on the core in virtual time, and what kvplane adds; writes docs/published.md (7 minutes in one process; PROCESSES=1)
	@$(PYTHON) -m tests.bench.tables --processes $(or $(PROCESSES),2)

peers: $(DEV)  ## prompts that move between three engines whose peers give wrong bytes, die, come back and forget; planted faults (REQUESTS=150 SEED=1)
	@$(PYTHON) -m tests.peers --requests $(or $(REQUESTS),150) --seed $(or $(SEED),1)

sim: $(DEV)  ## simulate the product under faults on a virtual clock (SEEDS=200 SEED_BASE=1 JOBS=4); equal seeds give equal runs
	@$(PYTHON) -m tests.sim --seeds $(SEEDS) --base $(SEED_BASE) $(if $(JOBS),--jobs $(JOBS))

replay-all: $(DEV)  ## both Mooncake traces and 100 Weka sessions on four models, with the table (KVPLANE_WORKLOADS=folder)
	@$(PYTHON) -m tests.acceptance.replay_all

policies: $(DEV)  ## hits by eviction policy on three public traces, with a bound; writes tests/bench/results (KVPLANE_WORKLOADS=folder)
	@$(PYTHON) -m tests.bench.policies

mixtures: $(DEV)  ## hits of hazard below LRU on mixtures of traces and on traffic made against it (CASES=10 of each kind, KVPLANE_WORKLOADS=folder)
	@$(PYTHON) -m tests.bench.mixtures --seeds $(or $(CASES),10)

faults: $(DEV)  ## kill, stop and cut off real processes, fill and damage their stores (FAULTS=40 SEED=1)
	@$(PYTHON) -m tests.faults --faults $(or $(FAULTS),40) --seed $(or $(SEED),1)

fleet: $(DEV)  ## three services, eight engines and two routers under kills, partitions, clock jumps and lost tables, with each kind of ownership (FAULTS=25 SEED=1)
	@$(PYTHON) -m tests.fleet --faults $(or $(FAULTS),25) --seed $(or $(SEED),1)

vllm-env: $(DEV)  ## set up vLLM 0.33.0 for a CPU, in an environment of its own (5 GB, ten minutes)
	@$(PYTHON) -m tests.vllm.environment

demo-vllm: vllm-env  ## vLLM engines are killed and come back with their cache: pages of a worker, or a disk (four minutes)
	@$(PYTHON) -m tests.vllm.demo

test-vllm: $(DEV)  ## an unmodified vLLM with kvplane's scheduler: its own tests, and live engines compared with stock (KVPLANE_VLLM_SEEDS=20)
	@$(PYTHON) -m pytest tests/vllm -m "vllm or not vllm" -rP --timeout 1800

sglang-env: $(DEV)  ## set up SGLang 0.5.23 for a CPU, in an environment of its own (4 GB, five minutes)
	@$(PYTHON) -m tests.sglang.environment

test-sglang: $(DEV)  ## kvplane's linker in SGLang: its 19 cache configurations, and live engines compared with stock (ten minutes)
	@$(PYTHON) -m pytest tests/sglang -m "sglang or not sglang" -rP --timeout 1800

soak: $(DEV)  ## ten minutes (HOURS=1) of churn on one service process: no resource may grow (STORE=sqlite|redis)
	@$(PYTHON) -m tests.soak --minutes $(if $(HOURS),$(shell expr 60 \* $(HOURS)),10) --store $(or $(STORE),sqlite)

fuzz: $(DEV)  ## coverage-guided fuzzing of every gRPC handler; findings go to tests/fuzz/found (SECONDS=1800)
	@$(PYTHON) -m tests.fuzz $(or $(SECONDS),1800)

fuzz-core: $(DEV)  ## random steps on the compiled core, with the Python core as oracle; findings go to tests/fuzz/found_steps (SECONDS=1800)
	@$(PYTHON) -m tests.fuzz $(or $(SECONDS),1800) --steps

clean:  ## remove environments, tools and caches
	rm -rf .venv .tools build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

NATIVE := $(wildcard clients/python/kvplane/base/hashing/*.cpp clients/python/kvplane/base/hashing/*.h) \
	$(wildcard service/kvplane_core/cpp/*.h service/kvplane_core/cpp/*/*.h \
	service/kvplane_core/cpp/*.cpp service/kvplane_fleet/native/*.h service/kvplane_fleet/native/*.cpp)

# The stamps are written last, so that an interrupted set-up is repeated.
PACKAGES := pyproject.toml locks/dev.txt scripts/setup.sh clients/python/native_build.py

$(RUNTIME): $(PACKAGES) $(NATIVE)
	@scripts/setup.sh service,cli
	@touch $@

.venv/kvplane-dev-packages: $(PACKAGES)
	@scripts/setup.sh service,cli,worker,dev
	@touch $@

LIBRARIES := $(addsuffix /_native.abi3.so,clients/python/kvplane/base/hashing service/kvplane_core/cpp service/kvplane_fleet/native)

# A changed C++ file, or a library that is gone, compiles the library, and installs nothing.
$(LIBRARIES) &: | .venv/kvplane-dev-packages
	@$(PYTHON) clients/python/native_build.py

$(DEV): .venv/kvplane-dev-packages $(NATIVE) | $(LIBRARIES)
	@$(PYTHON) clients/python/native_build.py
	@touch $(RUNTIME) $@
