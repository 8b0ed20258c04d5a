# One list of commands, for people and for CI. `make` alone prints it.

PYTHON ?=
VENV = .venv
BIN = $(VENV)/bin
LOCKED = $(VENV)/.locked
INSTALLED = $(VENV)/.installed
PREFETCHED = $(VENV)/.prefetched
PEERS = $(VENV)/.peers
AUDITOR = $(VENV)/audit
SITE = $(VENV)/site
LAB = $(VENV)/lab
FUZZER = $(VENV)/.fuzzer
BROWSER = $(VENV)/.browser
BROKER = $(VENV)/.broker
OBJECTSTORE = $(VENV)/objectstore
# Each process takes whole files, in the order of tests/conftest.py, and has a Spark session of its own.
TWO_PROCESSES = -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo lab test test-long test-notebooks test-cluster test-unity test-runtimes test-browser test-objectstore test-core fuzz fuzz-coverage soak soak-load bench bench-peers bench-shapes pictures audit docs docs-release packages links check fix clean java chromium

help: ## list the commands
	@echo "Lookback: rules over event streams, on Spark and Delta. First: make demo"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{ printf "  make %-13s %s\n", $$1, $$2 }'
	@echo
	@echo "  PYTHON=/path/to/python3.12 chooses the interpreter of $(VENV) (Python 3.10, 3.11 or 3.12)."

setup: java $(INSTALLED) $(PREFETCHED) ## make .venv with the locked versions and fetch Delta's JARs, once

demo: setup ## the whole pipeline on real transactions, at most 3 minutes
	@$(BIN)/lookback demo

lab: setup $(LAB) ## opens JupyterLab, at NOTEBOOK (such as 04) of notebooks if you name one
	@file=`ls notebooks/$(NOTEBOOK)*.ipynb 2>/dev/null | sed -n 1p`; \
	if [ -z "$$file" ]; then \
		echo "no notebook begins with $(NOTEBOOK); there are:" >&2; ls notebooks/*.ipynb >&2; exit 1; \
	fi; \
	$(LAB)/bin/jupyter lab $(if $(NOTEBOOK),"$$file",notebooks)

test: setup ## the tests, with real Spark, Delta and RocksDB
	@$(BIN)/python -m pytest $(TWO_PROCESSES)

test-long: setup $(BROKER) ## the tests that `make test` leaves out: of rare faults, of lost state, of growth
	@$(BIN)/python -m pytest $(TWO_PROCESSES) -m long --durations=20

test-notebooks: setup ## the notebooks, in order, in Jupyter by nbmake, some minutes
	@$(BIN)/python -m pytest -m notebook tests/notebooks

test-cluster: setup $(OBJECTSTORE) ## on a Spark cluster of several processes, on folders and in a bucket: executors, workers and drivers die in mid-batch
	@$(BIN)/python -m pytest -m cluster tests/spark/test_cluster.py

test-unity: setup ## tables of a catalog on a running server of the open-source Unity Catalog, UNITY, with its connector and Delta in the folder JARS
	@test -n "$(UNITY)" -a -n "$(JARS)" || { echo "name the server and the folder: make test-unity UNITY=http://127.0.0.1:8080 JARS=FOLDER; see docs/how-to/unity-catalog.md" >&2; exit 1; }
	@LOOKBACK_UNITY=$(UNITY) LOOKBACK_JARS=$(JARS) $(BIN)/python -m pytest -m "long or not long" tests/spark/test_catalog.py

test-runtimes: setup ## on the Spark of each Databricks Runtime, RUNTIMES of them ("4.0 4.1 4.2", or --brief), with what each brings
	@$(BIN)/python dev/tools/runtimes.py $(RUNTIMES)

test-browser: setup chromium $(BROWSER) ## the desks of the notebooks in JupyterLab and Chromium; PICTURES=docs/pictures saves what they look like, AGAIN=1 runs what failed
	@$(if $(PICTURES),LOOKBACK_PICTURES=$(abspath $(PICTURES)) )$(BIN)/python -m pytest -m browser tests/browser$(if $(AGAIN), --last-failed)

test-objectstore: setup $(OBJECTSTORE) ## tables and checkpoints on an S3 server of this machine, over an hour, or only TESTS; AGAIN=1 runs what failed
	@$(BIN)/python -m pytest -m objectstore -o faulthandler_timeout=1800 $(or $(TESTS),tests/spark)$(if $(AGAIN), --last-failed)

test-core: $(INSTALLED) ## the tests of the pure part, in seconds, no Java
	@$(BIN)/python -m pytest tests/core tests/testing

fuzz: $(INSTALLED) ## new generated cases against the oracle, and of bytes, texts and values, 10,000 of each kind, about 45 minutes
	@LOOKBACK_CASES=fuzz $(BIN)/python -m pytest -m "long or not long" -o faulthandler_timeout=0 tests/core/test_equals_oracle.py tests/core/values/test_pages.py tests/core/state/test_keyed.py tests/core/state/test_key_runs.py tests/core/fuzzing

fuzz-coverage: $(FUZZER) ## bytes, texts and values guided by coverage, SECONDS of each test (300): about an hour
	@$(BIN)/python tests/core/fuzzing/fuzz_coverage.py --seconds $(or $(SECONDS),300)

soak: setup ## kill -9 of ingest, authors and evaluation, KILLS of them (200): one or two hours; then proved
	@$(BIN)/python -m dev.soak --kills $(or $(KILLS),200) --seed $(or $(SEED),1)

soak-load: setup ## 1,000 rules, an alert for every event, a key with a million events, a burst: within the memory of 8 GB?
	@for load in rules storm key burst; do $(BIN)/python -m dev.soak.load $$load || failed=1; done; test -z "$$failed"

bench: setup ## throughput, latency and state against the goals, about an hour; nothing else should run
	@$(BIN)/python -m dev.bench

bench-peers: setup $(PEERS) ## the same beside other engines on the same events, about an hour
	@$(BIN)/python -m dev.bench --peers all

bench-shapes: $(INSTALLED) ## rules and events that are easily slow, by the core alone: within their bounds? a minute, no Java
	@LOOKBACK_BENCH_RESULTS=build/bench $(BIN)/python -m dev.bench shapes

pictures: setup ## the pictures of the notebooks in docs/pictures, drawn anew from the sample, some minutes
	@$(BIN)/python dev/tools/pictures.py

audit: $(AUDITOR) ## look the locked packages up among known vulnerabilities; needs a network and says so
	@$(BIN)/python dev/tools/audit.py --auditor $(AUDITOR)/bin/pip-audit --source $(or $(SOURCE),osv)

docs: $(SITE) ## the pages and the Python API as a site in build/site; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet
	@echo "open build/site/index.html; to search: python -m http.server -d build/site"

docs-release: $(SITE) ## the site of VERSION beside those of earlier ones, on the local branch gh-pages; PUSH=1 pushes it
	@PATH="$(abspath $(SITE)/bin):$$PATH" NO_MKDOCS_2_WARNING=1 mike deploy $(if $(PUSH),--push )--update-aliases "$(or $(VERSION),$(error name it: make docs-release VERSION=0.1.0))" latest
	@PATH="$(abspath $(SITE)/bin):$$PATH" mike set-default $(if $(PUSH),--push )latest

packages: $(INSTALLED) ## build wheel and sdist into dist, and try the wheel in an empty environment of each Python; needs a network
	@$(BIN)/python dev/tools/packages.py $(if $(PYTHON),--python $(PYTHON))

links: $(INSTALLED) ## ask every address in the pages; needs a network and says so
	@$(BIN)/python dev/tools/links.py --external

check: $(INSTALLED) ## format, lint, types, import order, links, repository; changes no file
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python dev/tools/links.py
	@$(BIN)/python -m pytest -q tests/project/test_repository.py

fix: $(INSTALLED) ## format, mend what can be mended, strip the outputs of notebooks
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .
	@$(BIN)/nbstripout notebooks/*.ipynb

clean: ## remove .venv, caches and what the demo made
	@rm -rf $(VENV) build dist lakehouse spark-warehouse metastore_db derby.log
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} +

# How this machine installs a package, for the messages below.
HINT = hint() { \
	if command -v apt-get >/dev/null 2>&1; then echo "sudo apt-get install $$1"; \
	elif command -v dnf >/dev/null 2>&1; then echo "sudo dnf install $$2"; \
	elif command -v brew >/dev/null 2>&1; then echo "brew install $$3"; \
	else echo "install it from your system's packages"; fi; }

# The first interpreter that runs, is 3.10 to 3.12 and can make a venv. One on PATH may be a shim that does not run.
$(LOCKED): requirements.lock
	@$(HINT); python=; bare=; \
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3.12 python3.11 python3.10 python3); do \
		"$$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1 || continue; \
		if "$$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then python=$$candidate; break; fi; \
		bare=$${bare:-$$candidate}; \
	done; \
	if [ -z "$$python" ] && [ -n "$$bare" ]; then \
		version=`"$$bare" -c 'import sys; print("%d.%d" % sys.version_info[:2])'`; \
		echo "$$bare has no venv module: `hint python$$version-venv python$$version python@$$version`, then again make." >&2; exit 1; \
	elif [ -z "$$python" ]; then \
		echo "$(if $(PYTHON),$(PYTHON) is not a,No) Python 3.10 to 3.12$(if $(PYTHON),, was found): `hint 'python3.12 python3.12-venv' python3.12 python@3.12`, or name one: make setup PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	echo "making $(VENV) with `"$$python" -c 'import sys; print("Python %d.%d.%d" % sys.version_info[:3])'` ..."; \
	rm -rf $(VENV); "$$python" -m venv $(VENV)
	@echo "installing the locked packages into $(VENV) (once, about 2 minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517 -r requirements.lock
	@touch $@

$(INSTALLED): $(LOCKED) pyproject.toml
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(PREFETCHED): $(LOCKED) | java $(INSTALLED)
	@$(BIN)/python -m lookback.spark.platform.jars
	@touch $@

# Kafka, for the tests alone: 60 MB. Without them the tests that need them say so.
$(BROKER): $(PREFETCHED)
	@PYTHONPATH=tests/support $(BIN)/python -m broker && touch $@ || true

# An S3 server by itself, as what it needs does not go with what is locked, and what Spark needs to reach it: 100 MB.
$(OBJECTSTORE): $(PREFETCHED)
	@echo "installing an S3 server for tests into $(OBJECTSTORE) (once) ..."
	@PYTHONPATH=tests/support $(BIN)/python -m objectstore
	@rm -rf $@; $(BIN)/python -m venv $@ && $@/bin/python -m pip install --quiet --disable-pip-version-check 'moto[s3]==5.2.5' flask==3.1.3 flask-cors==6.0.5 || { rm -rf $@; exit 1; }

# The other engines, for comparison alone: large, and on no path of the product.
$(PEERS): $(INSTALLED)
	@echo "installing the engines to compare with into $(VENV) (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c requirements.lock -e '.[bench]'
	@touch $@

# A fuzzer that is guided by coverage: large, and for Python 3.11 or newer.
$(FUZZER): $(INSTALLED)
	@echo "installing the fuzzer into $(VENV) (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c requirements.lock -e '.[fuzz]'
	@touch $@

# JupyterLab and what drives a browser: on no path of the product. The browser itself is the system's.
$(BROWSER): $(INSTALLED)
	@echo "installing JupyterLab and playwright into $(VENV) (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c requirements.lock -e '.[browser]'
	@touch $@

# A tool by itself, so that what it needs changes nothing of what is locked.
$(AUDITOR): $(INSTALLED)
	@echo "installing the auditor into $(AUDITOR) (once) ..."
	@rm -rf $@; $(BIN)/python -m venv $@ && $@/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1 || { rm -rf $@; exit 1; }

# What makes the site, by itself for the same reason. Once it is there, `make docs` needs no network.
$(SITE): $(LOCKED) Makefile
	@echo "installing mkdocs-material and mkdocstrings into $(SITE) (once) ..."
	@rm -rf $@; $(BIN)/python -m venv $@ && $@/bin/python -m pip install --quiet --disable-pip-version-check \
		mkdocs==1.6.1 mkdocs-material==9.8.2 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11 griffelib==2.4.1 ruff==0.17.5 mike==2.2.0 || { \
		rm -rf $@; echo "make docs needs the packages named above: run it again with a network." >&2; exit 1; }

# JupyterLab by itself, also so that nothing of what is locked changes. Its notebooks run in $(VENV), and its widgets fit
# the locked ipywidgets.
$(LAB): $(INSTALLED) Makefile
	@echo "installing JupyterLab into $(LAB) (once) ..."
	@rm -rf $@; $(BIN)/python -m venv $@ && $@/bin/python -m pip install --quiet --disable-pip-version-check \
		jupyterlab==4.6.6 `sed -n '/^jupyterlab-widgets==/p' requirements.lock` && \
		$(BIN)/python -m ipykernel install --prefix $@ --name python3 >/dev/null || { \
		rm -rf $@; echo "make lab needs the packages named above: run it again with a network." >&2; exit 1; }

# Before anything is installed; which versions will do, lookback.spark.platform.jars knows better.
java:
	@$(HINT); java=$${JAVA_HOME:+$$JAVA_HOME/bin/}java; \
	version=`"$$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | sed -n 1p`; \
	if [ "$${version:-0}" -lt 17 ]; then \
		echo "Java 17 or 21 is needed and $$java $${version:+is Java }$${version:-does not run}: `hint openjdk-17-jre-headless java-17-openjdk-headless openjdk@17`." >&2; exit 1; \
	fi

# Before JupyterLab is installed; which browsers will do, tests/browser/chromium.py knows.
chromium: $(INSTALLED)
	@$(BIN)/python tests/browser/chromium.py
