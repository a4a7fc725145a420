# make demo, make test: everything else happens by itself, and only once.
PYTHON ?= python3
VENV ?= .venv
# A machine without an NVIDIA driver gets the CPU build that CI uses; elsewhere pip chooses.
TORCH ?= $(shell if command -v nvidia-smi >/dev/null 2>&1; then echo 'torch>=2.11'; else echo 'torch==2.13.0'; fi)

BIN := $(VENV)/bin
KERNEL_SOURCES := $(shell find csrc -type f)

.PHONY: demo test beginning typecheck lint unit other_gpus sanitize doctor clean

demo: $(VENV)/.installed
	$(BIN)/te-dist demo

test: beginning lint typecheck unit

# Side by side: pip unpacks torch with one core.
beginning:
	@$(MAKE) --no-print-directory -j 2 $(VENV)/.torch other_gpus

unit: $(VENV)/.installed
	# One thread each: small tensors gain nothing from more, and spinning OpenMP threads stall a machine that is busy.
	# One for the compiler, too: else each process that compiles starts another, which imports torch.
	# Bytecode, wherever somebody wants none: the processes that tests start would each compile the package anew.
	# Rare garbage collections: tests/start has what each Python begins with.
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONDONTWRITEBYTECODE= \
	  PYTHONPATH="$(CURDIR)/tests/start$${PYTHONPATH:+:$$PYTHONPATH}" \
	  $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

# What is installed was compiled for this machine's GPU or for Hopper; this only compiles for Ada and Blackwell, where
# there is a compiler, and without optimizing, where that is an option: nobody runs what it makes. For Blackwell as far
# as PTX: an assembler that takes Hopper's takes it for what came after, too, and no source has a branch for that
# (tests/test_architectures.py).
other_gpus: build/other_gpus/.compiled

build/other_gpus/.compiled: $(KERNEL_SOURCES) Makefile
	@mkdir -p $(@D)
	@if command -v nvcc >/dev/null 2>&1; then \
	  if nvcc --help | grep -q Ofast-compile; then quick=--Ofast-compile=max; fi; \
	  for kind in 89.cubin 100a.ptx; do for source in csrc/cuda/*.cu; do echo "$$kind $$source"; done; done \
	  | xargs -P 2 -n 2 sh -c 'nvcc -std=c++17 -fmad=false --expt-relaxed-constexpr '"$$quick"' -arch=sm_$${0%.*} \
	      -$${0#*.} "$$1" -o $(@D)/$$(basename "$$1" .cu).$$0' \
	  && echo "sm_89 and sm_100a: the CUDA kernels compile" && touch $@; \
	else echo "no nvcc here: the CUDA kernels are not compiled for sm_89 and sm_100a"; fi

lint: $(VENV)/.installed
	$(BIN)/ruff check .

# parallel/ and launch/ are installed inside te_dist/; this lays them out like that for mypy.
typecheck: $(VENV)/.installed
	@rm -rf build/typecheck && mkdir -p build/typecheck/te_dist
	@for path in te_dist/* parallel launch; do \
	  case $$path in *__pycache__|*.so) ;; *) ln -s "$(CURDIR)/$$path" build/typecheck/te_dist/ ;; esac; done
	MYPYPATH=build/typecheck $(BIN)/mypy -p te_dist

# Needs a GPU and compute-sanitizer.
sanitize: $(VENV)/.installed
	$(BIN)/python tests/sanitize.py

doctor: $(VENV)/.installed
	$(BIN)/te-dist doctor

# Bytecode: pip would write all of it on one core. Torch's comes from all cores (some of its files are for other Pythons,
# and fail); of the tools few modules are imported, and write their own.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile '$(TORCH)'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib/python*/site-packages >/dev/null 2>&1 || true
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml te_dist/version.py $(KERNEL_SOURCES)
	$(BIN)/pip install -q --no-compile -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist demo_output te_dist/_kernels*.so
