# The template's own commands; "make help" lists them. They need Python 3.10 to 3.13, git and make.

PYTHON ?= python3
PROJECT := <<cookiecutter.project_slug>>
BIN := .venv/bin
OLD := build/cookiecutter-2.6.0
FLOORS := build/floors

# Tests of one file run in one process: they share its fixtures.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help demo test recipes slurm bench soak lint clean
.DELETE_ON_ERROR:

help:  ## list these commands
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' Makefile

demo: .venv/installed build/cookiecutter.yaml  ## make a project in build/digits and train it
	rm -rf build/digits
	$(BIN)/cookiecutter . --no-input --config-file build/cookiecutter.yaml -o build \
	    project_name=Digits project_slug=digits >build/bake.log
	rm -rf build/digits/output
	cd build/digits && OMP_NUM_THREADS=1 ../../$(BIN)/torchrun --standalone --nproc_per_node 2 \
	    train.py --config cfg.yaml MODEL.DEVICE cpu
	@$(BIN)/python -c 'import json; \
	    row = [json.loads(line) for line in open("build/digits/output/metrics.json")][-1]; \
	    print("test accuracy: {:.4f}".format(row["digits_test/accuracy"]))'
	@echo "$(BIN)/tensorboard --logdir build/digits/output"

test: lint $(OLD)/installed $(FLOORS)/installed  ## test the project's code, then bake projects and use them
	$(PYTEST) tests/project --confcutdir tests/project
	$(PYTEST) tests --ignore tests/project

recipes: .venv/installed  ## with each recipe, run the whole suite of a project, a training and a resume
	$(PYTEST) --dist load -m slow tests/test_each_recipe.py

slurm: .venv/installed  ## train under a real SLURM that the test starts; as root, with Debian's packages of it
	@for program in munged slurmctld slurmd sbatch; do \
	    PATH="$$PATH:/usr/sbin" command -v $$program >/dev/null || { echo "$$program is missing:" \
	        "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"; exit 1; }; done
	$(PYTEST) -m slow tests/test_slurm.py

PROGRAMS ?=
bench: .venv/installed  ## run the measuring programs: PROGRAMS="tests/bench/loop.py ..."
	$(BIN)/python tests/bench $(PROGRAMS)

KILLS ?= 100
SEED ?= 0
soak: .venv/installed  ## kill and resume trainings at random: KILLS=100 SEED=0
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py --kills $(KILLS) --seed $(SEED)

lint: .venv/installed  ## check the style of all Python
	$(BIN)/ruff check --no-cache hooks tests '$(PROJECT)'
	$(BIN)/ruff format --check --no-cache hooks tests '$(PROJECT)'

clean:  ## remove .venv, build and caches
	rm -rf .venv build
	find . -name .git -prune -o -type d \( -name __pycache__ -o -name .pytest_cache \
	    -o -name .ruff_cache \) -prune -exec rm -rf {} +

.venv/installed: requirements-dev.txt
	@command -v git >/dev/null || { echo "git is missing: install it, then run make again"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { echo \
	    "Python 3.10+ is missing ($(PYTHON)): run make again with PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo \
	    "Python's venv is missing ($(PYTHON)): install python3-venv, then run make again"; exit 1; }
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@touch $@

$(OLD)/installed: .venv/installed
	rm -rf $(OLD)
	$(BIN)/python -m pip install --quiet --target $(OLD) cookiecutter==2.6.0
	@touch $@

# The oldest release of each library that a project allows, in a folder of its own; torch is not
# among them, since requirements-dev.txt has its oldest one. One that has no wheel for this Python
# is not tested here.
$(FLOORS)/installed: .venv/installed $(PROJECT)/requirements.txt
	rm -rf $(FLOORS)
	@sed -n 's/^\([a-z]*\)>=/\1==/p' '$(PROJECT)/requirements.txt' | grep -v '^torch=' | while read -r pin; do \
	    echo "$$pin"; $(BIN)/python -m pip install --quiet --no-deps --only-binary :all: \
	        --target "$(FLOORS)/$${pin%%==*}" "$$pin" || echo "no $$pin for this Python"; done
	@touch $@

build/cookiecutter.yaml:
	@mkdir -p build
	@printf 'cookiecutters_dir: build/cookiecutters\nreplay_dir: build/replay\n' >$@
