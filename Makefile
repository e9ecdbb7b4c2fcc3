# make demo    install into .venv and run the demo
# make test    install into .venv and run the tests
# make check   format, lint, types, house rules
# make gpu     check and measure on a GPU
# make lock    choose the newest versions of all packages; make sbom lists what is installed

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_GPU := .venv/gpu/.installed
TOOLS := .venv/tools/.installed
COMPILED := .venv/.compiled
COMPILED_SOURCES := $(shell grep -rl --include='*.py' '^from numba import' planner sim)

# Tests start a thousand processes, which would all compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow check bench gpu schemas reference lock sbom clean

demo: $(COMPILED)
	$(BIN)/ropebridge demo

# The house rules, tests/house, are part of `make check`.
test: $(COMPILED)
	$(BIN)/pytest -n auto --dist loadgroup --ignore tests/house

# Longer proofs, kept out of `make test`, and every example of each property.
test-slow: $(COMPILED)
	ROPEBRIDGE_TEST_EXAMPLES=all $(BIN)/pytest -m 'slow or hypothesis'

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/house
	$(BIN)/python tests/house/sizes.py

# The figures in docs/measurements.md.
bench: $(COMPILED)
	$(BIN)/ropebridge bench simulator
	$(BIN)/ropebridge bench schedules
	$(BIN)/ropebridge bench executor
	$(BIN)/ropebridge bench fidelity
	$(BIN)/ropebridge bench adaptation
	$(BIN)/ropebridge bench gains
	$(BIN)/ropebridge bench clusters
	$(BIN)/ropebridge bench data
	$(BIN)/ropebridge bench diloco
	$(BIN)/ropebridge bench regions
	$(BIN)/ropebridge bench workers
	$(BIN)/ropebridge bench recovery
	$(BIN)/ropebridge bench jobs
	$(BIN)/ropebridge bench profile
	$(BIN)/ropebridge bench sweep
	$(BIN)/ropebridge bench report
	@# Last: without measured runs (docs/measurements.md) it refuses with status 2, and everything else is done.
	$(BIN)/ropebridge bench accuracy
	$(BIN)/ropebridge bench planner

# On CUDA: training checked, layers timed, steps predicted. The page names the hardware.
gpu: $(INSTALLED_GPU)
	.venv/gpu/bin/python -m experiments.benches.execution.gpu_check -o docs/measurements-gpu.md

# JSON Schema of the files that people write, for editors.
schemas: $(INSTALLED)
	$(BIN)/python -m experiments.tools.documentation schemas docs/schemas

# The verbs with their options, and the modules that strategies and policies build on.
reference: $(INSTALLED)
	$(BIN)/python -m experiments.tools.documentation reference docs/reference

$(INSTALLED): pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -c 'import sys; sys.exit("ropebridge needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --require-hashes --requirement requirements.lock
	@# What is left is torch, whose builds differ from index to index, and ropebridge itself.
	$(BIN)/pip install --quiet --no-build-isolation --constraint constraints.txt --editable '.[executor,solve,dev]'
	touch $(INSTALLED)

# Otherwise each of the tests' processes would compile anew what it calls of a changed file, some 40 s of a core.
$(COMPILED): $(INSTALLED) $(COMPILED_SOURCES)
	$(BIN)/python -m experiments.tools.compile_kernels
	touch $(COMPILED)

# The constraints are for machines without a GPU; a torch that the machine has already is used if it is new enough.
$(INSTALLED_GPU): pyproject.toml
	@command -v nvidia-smi >/dev/null || { echo 'make gpu: this machine has no GPU (there is no nvidia-smi)' >&2; exit 2; }
	$(PYTHON) -m venv --system-site-packages .venv/gpu
	.venv/gpu/bin/pip install --quiet --editable '.[gpu]'
	touch $(INSTALLED_GPU)

# The versions and hashes of all packages but torch, for every platform and Python from 3.11 on; what torch needs is named.
lock: $(TOOLS)
	printf '%s\n' safetensors filelock fsspec jinja2 networkx 'setuptools>=77,<82' sympy typing-extensions | \
		.venv/tools/bin/uv pip compile pyproject.toml - --extra solve --extra dev --universal --python-version 3.11 \
		--generate-hashes --no-annotate --no-header --quiet --upgrade --output-file requirements.lock

# The packages that are installed, in CycloneDX.
sbom: $(INSTALLED) $(TOOLS)
	.venv/tools/bin/cyclonedx-py environment $(BIN)/python --of JSON --output-file sbom.json

$(TOOLS):
	$(PYTHON) -m venv .venv/tools
	.venv/tools/bin/pip install --quiet cyclonedx-bom uv
	touch $(TOOLS)

clean:
	rm -rf .venv
