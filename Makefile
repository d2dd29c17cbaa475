# `make` alone lists the targets. Every target makes the environment that it needs, in .venv.

PYTHON ?= python3
# More arguments for pip's installation of torch, say: --index-url <an index that has the CPU build>
TORCH_INSTALL_ARGS ?=
# More arguments for pytest: make test ARGS="-k stream -x"
ARGS ?=
# For make test-full: K/N, a third of the covering rows and one part of the others
PART ?=

# Two pytest processes, which start with the tests of ranks (tests/workers.py); on two cores a third one gains nothing. A
# worker that dies is not replaced: a test that hangs ends the run. ARGS="-n 0" runs all tests in one process, as a
# debugger needs it.
TWO_WORKERS := -n 2 --dist loadfile --max-worker-restart 0

# Python keeps compiled source beside it, in __pycache__, also where the environment forbids it: else each of the thousands
# of processes that tests start would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
UNFINISHED := $(VENV)/.unfinished
LOG := $(VENV)/install.log

.DEFAULT_GOAL := help
.PHONY: help environment quickstart pictures test test-full test-slurm test-browser test-everything oracle lint docs format benchmark constraints clean clean-environment faults

help: ## list these targets
	@echo "usage: make TARGET [PYTHON=python3.12] [TORCH_INSTALL_ARGS='…'] [ARGS='…']"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: $(READY) ## train a small Llama, let it write code, then compare it under six layouts: some minutes
	@$(BIN)/titanlab train +recipe=quickstart
	@run=$$(ls -td runs/single/quickstart-*/ | head -n 1); run=$${run%/}; \
	 echo; echo "what it writes after \"def \":"; echo; \
	 $(BIN)/titanlab generate $$run --prompt "def " --tokens 120; \
	 echo; echo "everything of this run is in $$run; docs/run-folder.md says what each file is"
	@echo; echo "the same model under six layouts, from one process to eight:"; echo
	@$(BIN)/titanlab sweep +sweeps=quickstart_layouts --wait; code=$$?; echo; \
	 $(BIN)/titanlab collect quickstart_layouts && exit $$code
	@echo; echo "try next (after: . $(VENV)/bin/activate):"; \
	 echo "  titanlab status quickstart_layouts                             # how they ended"; \
	 echo "  titanlab train +recipe=quickstart parallelism=ddp name=ddp     # the same training, another layout"; \
	 echo "  titanlab sweep +recipe=quickstart optimizer=adamw,muon         # two optimizers"; \
	 echo "  titanlab sweep --help; titanlab train --help                   # all there is to choose"
	@echo; $(BIN)/titanlab report quickstart_layouts

test: $(READY) ## run the tests that take minutes together (ARGS='-k word' selects)
	@$(BIN)/python -m pytest -m "not full and not slurm and not browser" $(TWO_WORKERS) $(ARGS)

test-full: $(READY) ## run the slower layer of tests, and write the pages that show its rows (PART=3/24: a share of it)
	@TITANLAB_WRITE_PARITY=$(if $(PART),0,1) $(BIN)/python -m pytest -m "(full$(if $(PART),, or on_page)) and not slurm and not browser" \
	  $(if $(PART),--part $(PART)) $(TWO_WORKERS) $(ARGS)

test-slurm: $(READY) ## run sweeps on a real Slurm, started on this host; installs it if it is missing (Debian, as root)
	@launch/dev-slurm/install
	@$(BIN)/python -m pytest -m slurm $(ARGS)

test-browser: $(READY) ## open a report and the site in Chromium, with an accessibility checker; installs it if it is missing (Debian, as root)
	@tests/report/browser/install
	@$(BIN)/python -m pytest -m browser tests/report tests/docs/test_site_in_browser.py $(ARGS)
	@echo "screenshots: .cache/screenshots"

test-everything: test test-full test-slurm test-browser ## run all tests: about two hours on two cores

oracle: $(READY) ## compare what titanlab answers with the golden files of tests/oracle (ARGS=--write writes them)
	@$(BIN)/python -m tests.oracle $(ARGS)

faults: $(READY) ## plant faults, one at a time, and see that tests notice: some minutes (ARGS='checkpoint' selects)
	@$(BIN)/python -m tests.oracle.plant $(ARGS)

lint: $(READY) ## check style (ruff) and types (mypy)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(READY) ## build the documentation as a site in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open build/site/index.html; with search: $(BIN)/python -m http.server --directory build/site"

pictures: $(READY) ## draw the pictures of docs/ideas-in-pictures.md from the package's own accounts
	@$(BIN)/python benchmarks/pictures.py

format: $(READY) ## rewrite the source in the project's style
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

benchmark: $(READY) ## measure what the trainer costs beside a bare PyTorch loop; prints JSON
	@$(BIN)/python benchmarks/step_cost.py $(ARGS)

environment: $(READY) ## make or update .venv, and nothing else

constraints: $(READY) ## write what .venv has installed to constraints.txt
	@{ grep '^#' constraints.txt; \
	   $(BIN)/python -m pip freeze --all --exclude-editable --exclude pip --exclude titanlab | sed 's/+[A-Za-z0-9.]*$$//'; \
	 } > constraints.tmp && mv constraints.tmp constraints.txt && touch $(READY)
	@echo "constraints.txt: $$(grep -c == constraints.txt) packages"

clean: ## remove caches and builds; keeps .venv and runs/
	rm -rf .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find titanlab tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-environment: ## remove .venv
	rm -rf $(VENV)

# An installation that was interrupted leaves $(UNFINISHED), and the next one starts afresh.
$(READY): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "titanlab: PYTHON=$(PYTHON): is not installed; name a Python of 3.11 or newer, say make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "titanlab: PYTHON=$(PYTHON): must be Python 3.11 or newer, and is $$($(PYTHON) --version 2>&1 | tail -n 1); try make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "titanlab: PYTHON=$(PYTHON): cannot make virtual environments; install its venv (on Debian and Ubuntu the package python3-venv), or try make PYTHON=python3.12" >&2; exit 2; }
	@if [ -e $(UNFINISHED) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	   echo "titanlab: making $(VENV) with $$($(PYTHON) --version)"; \
	   rm -rf $(VENV) && mkdir $(VENV) && touch $(UNFINISHED) && $(PYTHON) -m venv $(VENV); \
	 fi
	@touch $(UNFINISHED); : > $(LOG)
	@echo "titanlab: installing PyTorch (the largest part; to watch: tail -f $(LOG))"
	@$(call pip_install,$(TORCH_INSTALL_ARGS) torch)
	@echo "titanlab: installing titanlab and its tools"
	@$(call pip_install,-e '.[dev]')
	@rm -f $(UNFINISHED); touch $@
	@echo "titanlab: $(VENV) is ready"

# pip says a lot, and it matters only when something fails.
pip_install = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(1) >> $(LOG) 2>&1 || \
  { tail -n 15 $(LOG) >&2; echo "titanlab: pip failed, see above and $(LOG); run make again when mended" >&2; exit 1; }
