# make venv | test | test-isa | test-rounding | lint | slow | oracle | gpu-check | demo | bench | clean. Each target brings the environment it needs.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
ORACLE := .venv-oracle
PIP_INSTALL := -m pip install --quiet --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)

# Upstream's own model code, without its training and serving stack. What importing it still asks for (accelerate,
# conformer, librosa, torchaudio, wandb, ...) tests/oracle/upstream.py stands in for: calling a model uses none of it.
UPSTREAM := f5-tts==1.1.22 x-transformers==2.31.10 torchdiffeq==0.2.5 torch-einops-utils==0.2.0 einx==0.4.3 \
	supertonic==1.3.1 chatterbox-tts==0.1.7 diffusers==0.29.0 voxcpm==2.0.3 echo-tts==0.1.4 vibevoice==0.0.1 \
	styletts2==0.1.6 einops_exts==0.0.4 token2wav-cosyvoice==0.1.0
UPSTREAM_NEEDS := einops==0.8.2 frozendict==2.5.1 loguru==0.7.3 pypinyin==0.55.0 requests==2.32.5 rjieba==0.2.2 \
	scipy==1.17.1

# The current folder never shadows an installed package (there is one called `kernels`).
export PYTHONSAFEPATH := 1

.PHONY: venv test test-isa test-rounding lint slow oracle gpu-check demo bench clean build/links

venv: .venv/stamp

%/stamp: pyproject.toml constraints.txt
	test -x $*/bin/python || $(PYTHON) -m venv $*
	$*/bin/python $(PIP_INSTALL) $(TORCH)
	$*/bin/python $(PIP_INSTALL) --editable '.[dev]'
	touch $@

# Two workers of one thread each: what takes long is compiling, which uses one core.
TEST := $(BIN)/pytest --numprocesses 2 --dist loadfile
test: venv
	OMP_NUM_THREADS=1 $(TEST) --durations=25

# The same tests where the matrix libraries take other code paths, as they do on another processor.
ISA_SETTINGS := MKL_CBWR=COMPATIBLE MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=2
test-isa: venv
	set -e; for setting in $(ISA_SETTINGS); do echo "== $$setting"; env OMP_NUM_THREADS=1 $$setting $(TEST); done

# Of these, the ones whose results depend on rounding most, under the setting that differs most.
test-rounding: venv
	OMP_NUM_THREADS=1 MKL_CBWR=COMPATIBLE $(TEST) tests/proof tests/compiler/test_build.py tests/compiler/test_auto.py \
		tests/engines

lint: venv build/links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/links $(BIN)/mypy --strict -p voicehub_aot

slow: venv
	$(BIN)/pytest -m 'slow and not oracle' --durations=15

oracle: $(ORACLE)/upstream
	$(ORACLE)/bin/pytest -m oracle

# On a machine with a CUDA device. Tests of an engine whose package is missing skip, and say so.
gpu-check: venv
	$(BIN)/pytest -m gpu -rs --durations=15

$(ORACLE)/upstream: $(ORACLE)/stamp Makefile
	$(ORACLE)/bin/python $(PIP_INSTALL) $(UPSTREAM_NEEDS)
	$(ORACLE)/bin/python $(PIP_INSTALL) --no-deps $(UPSTREAM)
	touch $@

demo: venv
	$(BIN)/python bench/demo.py

bench: demo
	set -e; for script in bench/bench_*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

# The package as mypy must see it: adapters, kernels and artifacts lie beside voicehub_aot, and install inside it.
build/links:
	rm -rf $@
	mkdir -p $@/voicehub_aot
	cd $@/voicehub_aot && ln -s ../../../voicehub_aot/* ../../../adapters ../../../kernels ../../../artifacts .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
