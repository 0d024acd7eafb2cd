# Two commands on a fresh machine: `make train` and `make test`. Each makes .venv and installs
# what it needs there; `pip install -r requirements.txt` does for an environment of your own.
PYTHON ?= python3
VENV := .venv
ARGS ?=

.PHONY: train test campaign lint format clean

train: $(VENV)/train  ## train GPT-2 small on the sample; more settings: make train ARGS="seed=1"
	$(VENV)/bin/python train.py model=gpt2-small $(ARGS)

test: $(VENV)/test  ## all tests
	$(VENV)/bin/python -m pytest -n 2 $(ARGS)

campaign: $(VENV)/test  ## what takes long; TEXTS=FOLDER compares the tokens of all texts there
	TEXTS="$(TEXTS)" $(VENV)/bin/python -m pytest -s tests/campaign_tokens.py $(ARGS)
	CAMPAIGN_KILLS=20 $(VENV)/bin/python -m pytest -k kill tests/test_prepare_stopped.py $(ARGS)
	CAMPAIGN_KILLS=20 $(VENV)/bin/python -m pytest tests/test_ranks_lost.py $(ARGS)
	CAMPAIGN_COMPILER=inductor $(VENV)/bin/python -m pytest -k computed tests/test_ranks.py $(ARGS)

lint: $(VENV)/test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/train: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/test: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:  ## removes the environment and caches, never runs/
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
