# Start with `make train` or `make test`. Both create .venv and install the requirements there. To use
# another environment: `pip install -r requirements.txt`.
PYTHON ?= python3
VENV := .venv
ARGS ?=
# --no-compile: Python compiles the modules that are imported; all modules of torch take a minute.
PIP_OPTIONS := -q --disable-pip-version-check --no-compile
# Three processes, because tests also wait: for W&B, a browser, a timeout. All tests of a file run in
# the same process, so that shared fixtures are built once.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# What `make test` leaves to `make test-all` (CONTRIBUTING.md has a table).
LONG := tests/headlens/browser tests/output/test_live_page.py tests/faults tests/ranks tests/docs \
    tests/scripts/test_sweep.py tests/benchmarks/test_dry_run.py
# The tests whose results benchmarks/results/faults.md reports.
FAULTS := $(filter-out %/test_prepare_stopped.py,$(wildcard tests/faults/test_*.py)) \
    tests/config/test_problems.py tests/output/test_rows.py
# Other tests that run more trials or more ranks with CAMPAIGN=1.
MORE_TRIALS := tests/test_data.py tests/test_data_loader.py tests/tokens tests/models/test_export.py \
    tests/ranks/test_ranks.py tests/faults/test_prepare_stopped.py tests/benchmarks/test_dry_run.py \
    tests/docs/test_notebook.py tests/scripts/test_sweep.py

# The type checker checks the model and the library with its preset `default`, all others with `basic`.
STRICT := attention.py model.py headlens

# A setting outside of ARGS would be a variable that nothing reads.
KNOWN := PYTHON VENV ARGS TEXTS PIP_OPTIONS PARALLEL FAULTS LONG MORE_TRIALS STRICT SHELL
OTHER := $(foreach v,$(filter-out $(KNOWN),$(.VARIABLES)),$(if $(filter command,$(origin $v)),$v=$($v)))
$(if $(strip $(OTHER)),$(error settings need quotes: make $(MAKECMDGOALS) ARGS="$(strip $(ARGS) $(OTHER))"))

.PHONY: help train test test-all campaign gpu-check gpus-check example matrix extras audit lint format clean

help:  ## this list
	@sed -n "s/^\([a-z-]*\):.*  ## /make \1: /p" Makefile

train: $(VENV)/train  ## train GPT-2 small on the sample story; other settings: make train ARGS=experiment=induction
	$(VENV)/bin/python train.py $(ARGS)

test: $(VENV)/test  ## the tests for a change, in four minutes
	$(VENV)/bin/python -m pytest $(PARALLEL) $(addprefix --ignore=,$(LONG)) $(ARGS)

test-all: $(VENV)/test  ## all tests: also browser, faults, several ranks, commands of the docs
	$(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

campaign: $(VENV)/test  ## the long tests, hours; TEXTS=FOLDER also compares the tokens of all text files there
	TEXTS="$(TEXTS)" $(VENV)/bin/python -m pytest -s tests/campaign/tokens.py $(ARGS)
	CAMPAIGN=1 $(VENV)/bin/python -m pytest $(PARALLEL) $(MORE_TRIALS) $(ARGS)
	CAMPAIGN=1 CAMPAIGN_COMPILER=inductor $(VENV)/bin/python -m pytest -k computed tests/ranks/test_ranks.py $(ARGS)
	CAMPAIGN_COMPILER=inductor $(VENV)/bin/python -m pytest -k compiled \
	    tests/models/test_decoding.py tests/models/test_generate.py $(ARGS)
	CAMPAIGN=1 CAMPAIGN_KILLS=20 $(VENV)/bin/python -m pytest tests/ranks/test_ranks_lost.py $(ARGS)
	rm -f campaign.jsonl
	CAMPAIGN_LOG=$(CURDIR)/campaign.jsonl CAMPAIGN=1 CAMPAIGN_FUZZ=1000000 \
	    $(VENV)/bin/python -m pytest $(PARALLEL) $(FAULTS) $(ARGS)
	$(VENV)/bin/python tests/helpers/tally.py campaign.jsonl benchmarks/results/reliability.json

gpu-check: $(VENV)/test  ## checks and measurements on one CUDA GPU in 9 minutes: one table and gpu.json
	$(VENV)/bin/python -m benchmarks.gpu $(ARGS)

gpus-check: $(VENV)/test  ## checks of 2 to 8 GPUs of one machine in 9 minutes: one table and gpus.json
	$(VENV)/bin/python -m benchmarks.gpus $(ARGS)

example: $(VENV)/test  ## train the run of docs/example again, and draw its page and the pictures of README.md
	rm -rf runs/induction
	PYTHONPATH=.:tests $(VENV)/bin/python tests/docs/example.py

# pyenv provides python3.N only for the versions in PYENV_VERSION.
matrix: $(VENV)/test  ## a reduced test suite with the oldest and newest torch on each Python of this machine
	PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | paste -sd: -) UV_SYSTEM_CERTS=1 \
	    $(VENV)/bin/nox --noxfile tests/noxfile.py $(ARGS)

# Separate environments, because these packages have many dependencies with fixed versions that
# training and the other tests do not need. The second one has the pre-release of Hydra 1.4.
extras:  ## tests with optional packages (Optuna, lm-eval, llama.cpp, ...) and Hydra 1.4; needs the network once
	$(PYTHON) -m venv $(VENV)/extras
	$(VENV)/extras/bin/pip install $(PIP_OPTIONS) -r requirements.txt pytest \
	    hydra-optuna-sweeper "lm-eval[hf]" transformer-lens gguf xllamacpp
	$(VENV)/extras/bin/python -m pytest $(addprefix tests/campaign/,extras.py lm_eval.py exported.py) $(ARGS)
	$(PYTHON) -m venv $(VENV)/hydra-1.4
	$(VENV)/hydra-1.4/bin/pip install $(PIP_OPTIONS) -r requirements.txt pytest hypothesis \
	    $(addsuffix ==1.4.0rc3,hydra-core $(addprefix hydra-,joblib-launcher submitit-launcher optuna-sweeper))
	$(VENV)/hydra-1.4/bin/python -m pytest tests/config tests/scripts/test_sweep.py \
	    tests/test_messages.py tests/campaign/extras.py $(ARGS)

# pip-audit is installed in a separate environment, so that it audits the packages of .venv only.
# --strict: a package that the service does not know is an error. sed removes torch's "+cpu" suffix,
# because PyPI has no such version.
audit: $(VENV)/test  ## known vulnerabilities of the installed packages; needs the network; ARGS="-s osv"
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/pip install $(PIP_OPTIONS) "pip-audit>=2.9"
	$(VENV)/bin/pip freeze | sed 's/+[a-z0-9.]*$$//' > $(VENV)/audit/installed.txt
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r $(VENV)/audit/installed.txt $(ARGS)

lint: $(VENV)/test  ## ruff, layers (tach.toml), types (pyrefly)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/tach check
	$(VENV)/bin/pyrefly check
	$(VENV)/bin/pyrefly check --preset default $(STRICT)

format: $(VENV)/test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

PYTHON_IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11) and \
    "Python %d.%d is too old; give Python 3.11 or newer, such as PYTHON=python3.12" % sys.version_info[:2])

$(VENV)/train: requirements.txt requirements-extra.txt requirements-floors.txt
	@$(PYTHON) -c '$(PYTHON_IS_NEW_ENOUGH)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(PIP_OPTIONS) -r requirements.txt
	touch $@

$(VENV)/test: requirements.txt requirements-extra.txt requirements-dev.txt requirements-floors.txt
	@$(PYTHON) -c '$(PYTHON_IS_NEW_ENOUGH)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(PIP_OPTIONS) -r requirements-dev.txt
	touch $@

clean:  ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build headlens.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
