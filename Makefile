# make setup    build .venv (CPU); again only when the requirements change
# make test     set up what is missing, run the tests      (PYTEST_ARGS=...)
# make test-all the same with those that take minutes
# make test-versions    the planner's tests on every supported torchrec
#                       (VERSIONS="1.8.0 1.9.2")
# make support-table    train what docs/support.md lists, and write its table
# make gate     plan fixed tasks, compare with tests/gate/plans.json
#               (GATE_ARGS=--write renews the file)
# make demo     set up what is missing, train TorchRec's plans and ours in turn:
#               a minute, up to three beside other work (DEMO_ARGS=...)
# make race     measure this machine, train plans of 20 models in turn: an hour
#               (TABLES=real_tables.json TENTH=yes: 2 models, 6 minutes)
# make docs     build the documentation in site/; warnings are errors
# make reproduce    calibrate this machine, compare every planner on 40 tasks: 75 minutes
#               (TABLES=real_tables.json TENTH=yes: a tenth of it, 10 minutes)
# make lint     formatting, lint rules, types
# make format   apply formatting and the safe lint fixes
# make check    lint + test

# The interpreter that .venv is built from: 3.11, 3.12 or 3.13.
PYTHON ?= python3
# Package index that holds PyTorch's CPU builds. Empty: what pip is set up with,
# which on Linux is usually the (far larger) CUDA build; that works too.
TORCH_INDEX_URL ?=
PYTEST_ARGS ?=
# Two processes; the tests of a file stay in one.
PYTEST := -m pytest -n 2 --dist loadgroup
DEMO_ARGS ?=
GATE_ARGS ?=
RACE_ARGS ?=
REPRODUCE_ARGS ?=
TABLES ?=
# Releases of torchrec that are supported.
VERSIONS ?= $(shell $(BIN)/python -c "from torchrec_neuroshard.hardware.doctor import \
	RELEASES; print(*(torchrec for _, torchrec in RELEASES.values()))")

# Another folder beside another interpreter: make test PYTHON=python3.12 VENV=.venv312
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
REQUIREMENTS := $(sort $(wildcard requirements/*.txt))
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input \
	--retries 10 --timeout 60
INSTALL := $(PIP) install --constraint requirements/constraints.txt
# One thread per process: results repeat, and several ranks share a few cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: setup test test-all test-versions support-table gate demo race docs reproduce lint format check clean
.DELETE_ON_ERROR:

setup: $(STAMP)

# The order matters: torchrec goes in with --no-deps, else it fetches the newest
# CUDA build of fbgemm, whose files overwrite those of fbgemm-gpu-cpu.
$(STAMP): $(REQUIREMENTS) pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { echo "There is no $(PYTHON) here." \
	"Name another interpreter: make setup PYTHON=python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; \
	sys.exit(0 if v in ((3, 11), (3, 12), (3, 13)) else \
	"This project needs Python 3.11, 3.12 or 3.13, but $(PYTHON) is %d.%d.\n" % v + \
	"Name another interpreter: make setup PYTHON=python3.11")'
	"$(PYTHON)" -m venv $(VENV)
ifneq ($(strip $(TORCH_INDEX_URL)),)
	$(PIP) install --no-deps --index-url "$(TORCH_INDEX_URL)" \
	-r requirements/torch.txt
endif
	$(INSTALL) -r requirements/torch.txt
	$(INSTALL) --no-deps -r requirements/torchrec-cpu.txt
	$(INSTALL) -r requirements/runtime.txt -r requirements/dev.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	$(BIN)/neuroshard doctor --load
	@touch $@

test: $(STAMP)
	$(ONE_THREAD) $(BIN)/python $(PYTEST) $(PYTEST_ARGS)

test-all: $(STAMP)
	$(ONE_THREAD) $(BIN)/python $(PYTEST) -m "" $(PYTEST_ARGS)

test-versions: $(STAMP)
	$(ONE_THREAD) VERSIONS="$(VERSIONS)" PYTHON="$(BIN)/python" \
	PYTEST_ARGS="$(PYTEST_ARGS)" .ci/test_versions

support-table: $(STAMP)
	$(ONE_THREAD) WRITE_SUPPORT_TABLE=1 $(BIN)/python -m pytest -q -m nightly \
	tests/distributed/test_support.py

gate: $(STAMP)
	$(ONE_THREAD) PYTHONPATH=benchmarks $(BIN)/python -m tests.gate.plan_gate $(GATE_ARGS)

demo: $(STAMP)
	PYTHONHASHSEED=0 $(ONE_THREAD) $(BIN)/torchrun --standalone --nproc-per-node 2 \
	benchmarks/race_plans.py --tasks mlperf-2 --planners ours,best-practice,all-types \
	--rounds 20 --out demo $(DEMO_ARGS)

docs: $(STAMP)
	$(INSTALL) -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The cost model of an earlier call is used again.
reproduced/measured_%:
	$(ONE_THREAD) $(BIN)/neuroshard calibrate --out $@ --num-sets $*

# And the collectives that belong to it.
reproduced/measured_%/comms.json: | reproduced/measured_%
	$(ONE_THREAD) $(BIN)/torchrun --standalone --nproc-per-node 2 \
	-m torchrec_neuroshard collect comms --backend gloo \
	--num-samples $(if $(TENTH),100,250) --seconds 120 --max-bytes 268435456 --out $(@D)/comms.jsonl
	$(BIN)/neuroshard train $(@D)/comms.jsonl --out $(@D)

MEASURED := reproduced/measured_$(if $(TENTH),100,300)
race: $(STAMP) $(MEASURED)/comms.json
	PYTHONHASHSEED=0 $(ONE_THREAD) $(BIN)/torchrun --standalone --nproc-per-node 2 \
	benchmarks/race_plans.py --cost-model $(MEASURED) --out reproduced/race \
	$(if $(TABLES),--tables "$(TABLES)") \
	$(if $(TENTH),--num-tasks 2 --rounds 20) $(RACE_ARGS)

ifdef TENTH
REPRODUCE_BUNDLES := reproduced/measured_100
REPRODUCE := --cost-model reproduced/measured_100 --num-tasks 4 --minutes 6
else
REPRODUCE_BUNDLES := reproduced/measured_300 reproduced/measured_100
REPRODUCE := --cost-model reproduced/measured_300 --few-sets reproduced/measured_100 \
	--num-tasks 40 --minutes 60
endif

reproduce: $(STAMP) $(REPRODUCE_BUNDLES)
	PYTHONHASHSEED=0 $(ONE_THREAD) $(BIN)/python benchmarks/compare_planners.py \
	--out reproduced/planners $(if $(TABLES),--tables "$(TABLES)") --seed 45 \
	--max-rows 400000 \
	--max-lookups 4000000 --rounds 4 --scaled-to h100 --planning-processes 2 \
	--plan-seconds 30 --solver-seconds 1 $(REPRODUCE) $(REPRODUCE_ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check:
	$(MAKE) lint
	$(MAKE) test

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
