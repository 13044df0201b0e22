# Two commands: `make run` and `make test` set up all they need. Only Python >= 3.11 with pip is required.
# DEVICE=cuda takes torch's CUDA build; cpu (the default) its CPU build where one is to be had.
PYTHON ?= python3
VENV ?= .venv
DEVICE ?= cpu
BIN = $(VENV)/bin
# A file's tests stay together: what they share is set up once.
PARALLEL = -n logical --maxprocesses 4 --dist loadfile
TORCH = "torch>=2.8,<2.14"
export UV_HTTP_TIMEOUT = 30

.PHONY: run test test-slow test-long test-live test-cuda docs lint clean

run: $(VENV)/train.ok
	$(BIN)/python train.py

test: $(VENV)/dev.ok lint
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not long and not live and not cuda"

test-slow: $(VENV)/dev.ok
	$(BIN)/python -m pytest -m "not long and not live and not cuda"

# With real vLLM workers, in an environment of their own (3.5 GB, in your cache or $$CONDUCTOR_LIVE_ENV).
test-live: $(VENV)/dev.ok
	$(BIN)/python -m runtime.vllm_workers setup
	$(BIN)/python -m pytest -m "live and not long" tests/live

# What takes hours on two cores: the documentation's long commands, this file's own among them, each page in a clone.
test-long: $(VENV)/dev.ok
	$(BIN)/python -m runtime.vllm_workers setup
	$(BIN)/python -m pytest -m long tests/test_docs.py tests/live

# On a GPU: training, and workers with their KV in its memory.
test-cuda: DEVICE = cuda
test-cuda: $(VENV)/dev.ok
	$(BIN)/python -m pytest -m cuda tests/cuda

# The documentation as a site, its notebook run.
docs: $(VENV)/dev.ok
	DOCS_EXECUTE=true $(BIN)/python -m mkdocs build

lint: $(VENV)/dev.ok
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/pip.ok:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch first and by itself. uv knows where PyTorch keeps its builds for each kind of device; where that place cannot be
# reached, pip takes what the configured package index has.
$(VENV)/torch.ok: $(VENV)/pip.ok
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend=$(if $(filter cpu,$(DEVICE)),cpu,auto) $(TORCH) \
	  || $(BIN)/python -m pip install --quiet $(TORCH)
	touch $@

$(VENV)/train.ok: $(VENV)/torch.ok pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[train]"
	touch $@

$(VENV)/dev.ok: $(VENV)/train.ok
	$(BIN)/python -m pip install --quiet -e ".[train,rllib,serve,worker,store,export,docs,dev]"
	touch $@

clean:
	rm -rf $(VENV) build site *.egg-info
