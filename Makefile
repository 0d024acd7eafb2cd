# Two commands on a fresh machine: `make train` and `make test`. Each makes .venv and installs
# what it needs there; `pip install -r requirements.txt` does for an environment of your own.
PYTHON ?= python3
VENV := .venv
ARGS ?=
# Two processes; each file runs in one of them, so that what its tests share is made once.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
# The tests of docs/reliability.md.
FAULTS := $(filter-out %/test_prepare_stopped.py,$(wildcard tests/faults/test_*.py)) \
    tests/training/config/test_problems.py tests/training/reporting/test_rows.py
# Other tests that have more trials or more ranks with CAMPAIGN=1.
MORE_TRIALS := tests/test_data.py tests/test_data_loader.py tests/tokens tests/interop/test_export.py \
    tests/training/distributed/test_ranks.py

# What the type checker checks with its preset `default`; the rest has `basic`.
STRICT := attention.py model.py files.py lens inference interop tests/budgets.py \
    $(addprefix tokens/,readers.py sampler.py windows.py) \
    $(addprefix training/distributed/,build.py process_group.py) \
    $(addprefix training/optim/,loss_spikes.py optimizers.py) \
    $(addprefix training/planning/,memory.py devices.py) training/checkpoint/listing.py \
    $(addprefix training/reporting/,console.py machine.py profiler.py tracker.py) \
    $(addprefix benchmarks/,equivalence.py generate.py timing.py training.py) \
    scripts/attention_ladder.py

.PHONY: train test campaign extras audit lint format clean

train: $(VENV)/train  ## train GPT-2 small on the sample; more settings: make train ARGS="seed=1"
	$(VENV)/bin/python train.py model=gpt2-small $(ARGS)

test: $(VENV)/test  ## all tests
	$(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

campaign: $(VENV)/test  ## what takes hours; TEXTS=FOLDER compares the tokens of all texts there
	TEXTS="$(TEXTS)" $(VENV)/bin/python -m pytest -s tests/campaign/tokens.py $(ARGS)
	CAMPAIGN=1 $(VENV)/bin/python -m pytest $(PARALLEL) $(MORE_TRIALS) $(ARGS)
	CAMPAIGN_COMPILER=inductor $(VENV)/bin/python -m pytest -k computed tests/training/distributed/test_ranks.py $(ARGS)
	CAMPAIGN_COMPILER=inductor $(VENV)/bin/python -m pytest -k compiled \
	    tests/inference/test_decoding.py tests/inference/test_generate.py $(ARGS)
	CAMPAIGN_KILLS=20 $(VENV)/bin/python -m pytest tests/training/distributed/test_ranks_lost.py $(ARGS)
	rm -f campaign.jsonl
	CAMPAIGN_LOG=$(CURDIR)/campaign.jsonl CAMPAIGN=1 CAMPAIGN_FUZZ=1000000 \
	    $(VENV)/bin/python -m pytest $(PARALLEL) $(FAULTS) $(ARGS)
	$(VENV)/bin/python tests/helpers/tally.py campaign.jsonl benchmarks/results/reliability.json

# In an environment of its own: these packages bring many others along, at versions of their choice,
# and neither training nor the tests need any of them.
extras:  ## what works with packages that are optional: Optuna, lm-eval; needs the network once
	$(PYTHON) -m venv $(VENV)/extras
	$(VENV)/extras/bin/pip install -q --disable-pip-version-check -r requirements.txt pytest \
	    hydra-optuna-sweeper "lm-eval[hf]"
	$(VENV)/extras/bin/python -m pytest tests/campaign/extras.py tests/campaign/lm_eval.py $(ARGS)

# In an environment of its own, so that what is installed is what is audited. --strict: a package
# that the service does not know is a failure, not a pass. torch's "+cpu" is no version of PyPI's.
audit: $(VENV)/test  ## known vulnerabilities of what is installed; needs the network; ARGS="-s osv"
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/pip install -q --disable-pip-version-check "pip-audit>=2.9"
	$(VENV)/bin/pip freeze | sed 's/+[a-z0-9.]*$$//' > $(VENV)/audit/installed.txt
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r $(VENV)/audit/installed.txt $(ARGS)

lint: $(VENV)/test  ## ruff, layers (tach.toml), types (pyrefly), budgets (tests/budgets.py)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/tach check
	$(VENV)/bin/pyrefly check
	$(VENV)/bin/pyrefly check --preset default $(STRICT)
	$(VENV)/bin/python -m tests.budgets

format: $(VENV)/test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/train: requirements.txt requirements-floors.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/test: requirements.txt requirements-dev.txt requirements-floors.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:  ## removes the environment and caches, never runs/
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
