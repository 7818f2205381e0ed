# make grpo                      the main job: ten minutes of GRPO on the model that ships
# make grpo MINUTES=1 KL=0       the same with other settings
# make compare ROLLOUTS=32 SEEDS=5   all methods over seeds; stop it and call it again as you like
# make ppo | test | lint | board | memory | tags
PYTHON ?= python3
MINUTES ?= 10
KL ?= 0.05
ROLLOUTS ?= 32
SEEDS ?= 5
FLAGS ?=
BIN = .venv/bin

.PHONY: grpo ppo compare memory test lint board tags

grpo ppo: .venv/ready
	$(BIN)/python $@.py --minutes $(MINUTES) --kl $(KL) $(FLAGS)

compare: .venv/extra
	$(BIN)/python compare.py --rollouts $(ROLLOUTS) --seeds $(SEEDS) $(FLAGS)

memory: .venv/ready
	$(BIN)/python memory.py

test: .venv/ready
	$(BIN)/python -m pytest -q tests $(FLAGS)

lint: .venv/extra
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

board: .venv/ready
	$(BIN)/tensorboard --logdir runs

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/extra: requirements-extra.txt .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-extra.txt
	@touch $@

# A tag for every commit with an `Episode: 07.2 group-advantages` trailer: ep07.2-group-advantages
tags:
	@git log --reverse --format='%H %(trailers:key=Episode,valueonly,separator=%x20)' | \
	while read -r commit step name; do \
		if [ -n "$$name" ]; then git tag -f "ep$$step-$$name" "$$commit" > /dev/null && echo "ep$$step-$$name"; fi; \
	done
