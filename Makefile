# SPDX-License-Identifier: Apache-2.0
#
#   make demo     train a small GPT with ZeRO-3 on two ranks; DEVICE RANKS STEPS PRESET OFFLOAD SCRATCH MEMORY DATA RESUME YES
#   make test     every test that this machine can run; PYTEST_ARGS; DEVICE=sim runs those of ranks on a simulated GPU
#   make test-quick  one test of each file, in about three minutes; PYTEST_ARGS
#   make test-sim  a sample of the tests of ranks on a simulated GPU, in about a minute; PYTEST_ARGS
#   make lint     ruff, mypy, gcc and clang with warnings as errors, the layers of csrc/, the ceilings of the structure
#   make sanitize C tests under AddressSanitizer + UBSan and ThreadSanitizer
#   make test-aarch64  C tests built for aarch64, in emulation (qemu-user-static), in about ten minutes; PROGRAMS
#   make fuzz     every tests/fuzz/*.c for FUZZ_SECONDS (20)
#   make bench    benchmarks against torch, gloo, DeepSpeed; NAME=... picks some
#   make wheel    a cp310-abi3 wheel in dist/, with CUDA kernels for sm_75 to sm_120
#   make wheels   the wheels of a release: manylinux_2_28 for x86-64 and aarch64, with a compiler from PyPI; TWICE=1 builds
#                 them again in a clone and compares the bytes
#   make release VERSION=x.y.z  checks, builds and tries the wheels of a release, and tags it
#   make docs     the documentation site in site/
#   make clean    what builds made (not .venv, not out/)
#
# PYTHON= picks the interpreter, TORCH_INDEX= another index of torch wheels (see scripts/venv.sh).

VENV ?= .venv
PY = $(VENV)/bin/python
FUZZ_SECONDS ?= 20
GPU_BENCHES = $(patsubst benchmarks/%.py,%,$(filter-out %/gpu_overhead.py,$(wildcard benchmarks/gpu_*.py)))
export PYTHON TORCH_INDEX

INSTALL_INPUTS = pyproject.toml setup.py scripts/venv.sh

.PHONY: demo test test-quick test-sim test-aarch64 lint sanitize fuzz bench wheel wheels release docs clean build-demo build-test build-lint build-bench build-docs
.DELETE_ON_ERROR:

# One stamp an extra: the environment is made once, and again when what it is made from changes.
$(VENV)/.installed-%: $(INSTALL_INPUTS)
	@scripts/venv.sh $(VENV) $*
	@touch $@

# The C module is brought up to date at every call; that costs less than a second when nothing changed.
build-demo build-test build-lint build-bench build-docs: build-%: $(VENV)/.installed-%
	@$(PY) setup.py -q build_ext --inplace

demo: build-demo
	@$(PY) examples/demo.py --device=$(DEVICE) --ranks=$(RANKS) --steps=$(STEPS) --preset=$(PRESET) \
		--offload=$(OFFLOAD) --scratch=$(SCRATCH) --memory=$(MEMORY) --data=$(DATA) --resume=$(RESUME) --yes=$(YES)

test: build-test
	$(PY) -m pytest -m "slow or not slow" $(if $(DEVICE),--device=$(DEVICE)) $(PYTEST_ARGS)

test-quick: build-test
	$(PY) -m pytest --quick $(PYTEST_ARGS)

# One test of each of these files. `make test DEVICE=sim` runs all tests of all files.
SIM_SAMPLE = $(addprefix tests/zero/test_,bad_input.py bf16.py buffers.py conformance.py fp16.py low_states.py models.py \
	origin.py precision.py spread.py stages.py unfreeze.py values.py) tests/checkpoint/test_ranks.py

test-sim: build-test
	$(PY) -m pytest --quick --device=sim $(SIM_SAMPLE) $(PYTEST_ARGS)

lint: build-lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) scripts/lint_c.py
	$(PY) scripts/lint_structure.py

sanitize: $(VENV)/.installed-test
	$(PY) tests/c/run.py --flavor asan tsan

test-aarch64: $(VENV)/.installed-wheels
	$(PY) scripts/test_aarch64.py $(PROGRAMS)

fuzz: $(VENV)/.installed-test
	$(PY) tests/c/run.py --fuzz $(FUZZ_SECONDS)

bench: build-bench
	$(PY) benchmarks/run.py $(or $(NAME),$(if $(filter cuda,$(DEVICE)),$(GPU_BENCHES)))

# Every wheel has the CUDA kernels: where no nvcc is installed, PyPI's is (the extra `cuda`).
HAVE_NVCC = $(shell command -v nvcc || ls $${CUDA_HOME:-/usr/local/cuda}/bin/nvcc 2>/dev/null)
wheel: $(VENV)/.installed-test $(if $(HAVE_NVCC),,$(VENV)/.installed-cuda)
	ZEROPP_KERNELS=1 $(PY) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	$(PY) -m abi3audit --strict --report dist/zeropp-*.whl >/dev/null
	@ls dist/zeropp-*.whl

wheels: $(VENV)/.installed-wheels $(if $(HAVE_NVCC),,$(VENV)/.installed-cuda)
	$(PY) scripts/wheels.py $(if $(TWICE),--twice)

release: $(VENV)/.installed-wheels $(if $(HAVE_NVCC),,$(VENV)/.installed-cuda)
	$(PY) scripts/release.py $(VERSION) $(if $(AARCH64_PYTHON),--aarch64-python $(AARCH64_PYTHON))

docs: build-docs
	NO_MKDOCS_2_WARNING=1 $(PY) scripts/site/build.py

clean:
	rm -rf build dist site python/*.egg-info python/zeropp/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
