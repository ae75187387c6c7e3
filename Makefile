# make demo: set up .venv and go from handwritten digits to frozen features; make demo-comparison: on to fine-tuning and
#   segmentation, with and without pre-training
# make test: set up .venv and run lint and the tests (no slow and no GPU ones)
# make test-detection: set up .venv, and on top of it .venv-detection (MMDetection, MMRotate, MMPose, and MMCV's operators
#   compiled here for the CPU), and run the tests of their recipes
# make research: set up .venv, and on top of it .venv-research with Snakemake, which runs the tables in research/
# make test-research: set up .venv-research, and run a small table with kills, and as root on Slurm's daemons as well
# make test-openmmlab: set up .venv-openmmlab, OpenMMLab's original distributions with Python 3.11 and PyTorch 2.6, and
#   run the tests there; MMCV's operators are compiled once and kept in ~/.cache/mapet_mm
# make test-newest: set up .venv-newest with the newest release of everything, run the tests of CONTRIBUTING's table of
#   private attributes, and the demo
# make bench-gpu: set up .venv, and on this machine's GPU run the tests for one and measure training steps and tokens;
#   PARTS="smoke bench" for some, AUTHORS=FOLDER for a clone of the authors' code beside, DRY=1 for a try on the CPU
# make docs: set up .venv-docs, which needs no PyTorch, and build the documentation's pages into build/site
# Tests in more processes than three: make test JOBS=8
# Another interpreter than the first that fits: make setup PYTHON=/path/to/python3.11

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_WARN_SCRIPT_LOCATION=1 PYTHONWARNINGS=ignore $(BIN)/python -m pip
# An interpreter fits if it is 3.10 or newer and can make a virtual environment with pip in it.
FITS := import sys, ensurepip; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.10 python3 python; do \
	$$p -c '$(FITS)' >/dev/null 2>&1 && echo $$p && break; done)
START := $(shell date +%s)
# Sees the packages of $(VENV) behind its own, among which is the MMCV with operators.
DETECTION := .venv-detection
DETECTION_BIN := $(DETECTION)/bin
DETECTION_STAMP := $(DETECTION)/.installed
RESEARCH := .venv-research
RESEARCH_BIN := $(RESEARCH)/bin
RESEARCH_STAMP := $(RESEARCH)/.installed
OPENMMLAB := .venv-openmmlab
OPENMMLAB_BIN := $(OPENMMLAB)/bin
OPENMMLAB_STAMP := $(OPENMMLAB)/.installed
OPENMMLAB_PYTHON ?= python3.11
MMCV_CACHE := $(HOME)/.cache/mapet_mm/torch-2.6.0
MMCV_WHEEL := $(MMCV_CACHE)/mmcv-2.1.0-cp311-cp311-linux_$(shell uname -m).whl
NEWEST := .venv-newest
NEWEST_BIN := $(NEWEST)/bin
DOCS := .venv-docs
DOCS_BIN := $(DOCS)/bin
DOCS_STAMP := $(DOCS)/.installed
# Processes that tests run in: for a quarter of the time a test waits, so three keep two cores busy.
JOBS ?= 3
# glibc keeps the memory that a process frees, so that a step on CPUs waits less for pages.
KEEP_MEMORY := MALLOC_ARENA_MAX=1 MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_MMAP_THRESHOLD_=2147483647
TORCH := torch==2.11.0 torchvision==0.26.0

.PHONY: help setup demo demo-comparison test test-detection research test-research test-openmmlab test-newest coverage docs bench-gpu lint format lock clean

help:
	@echo "make setup   install everything into $(VENV), pinned by requirements.lock"
	@echo "make demo    set up, then go from handwritten digits to frozen features (2 to 5 minutes)"
	@echo "make demo-comparison   on to fine-tuning and segmentation, with and without pre-training (20 minutes)"
	@echo "make test    set up, then lint and run the tests"
	@echo "make coverage   set up, then run the same tests and say which lines and branches they do not run"
	@echo "make test-detection   set up $(DETECTION) as well, then test detection and pose estimation"
	@echo "make research   set up $(RESEARCH) as well, with Snakemake, for the tables in research/"
	@echo "make test-research   run one of these tables with kills, here and (as root) on a Slurm of one node"
	@echo "make test-openmmlab   set up $(OPENMMLAB) with OpenMMLab's original distributions, then run the tests there"
	@echo "make test-newest   set up $(NEWEST) with the newest of everything, then try what that may break"
	@echo "make docs    set up $(DOCS) without PyTorch, then build the documentation's pages into build/site"
	@echo "make bench-gpu   test and measure on a GPU (10 minutes), into work_dirs/gpu/page.md"
	@echo "make lint    check style;  make format: apply it"
	@echo "make lock    rewrite requirements.lock from requirements.txt (needs uv)"
	@echo "make clean   remove the environments and caches; data/ and work_dirs/ stay"

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@"$(or $(PYTHON),false)" -c '$(FITS)' >/dev/null 2>&1 || { \
		echo "error: $(if $(PYTHON),$(PYTHON) is not,found no) Python 3.10 or newer with venv and pip:" \
			"install one (Debian, Ubuntu: also its -venv package) or name it, make setup PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		echo "making $(VENV) with $$($(PYTHON) --version)"; "$(PYTHON)" -m venv --clear $(VENV); }
	@echo "installing the locked packages into $(VENV): about 2 minutes and 6 GB the first time"
	@$(PIP) install --quiet -r requirements.lock
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
	@echo "set up $(VENV); next: source $(VENV)/bin/activate && mapet-mm --version"

demo: $(STAMP)
	@$(KEEP_MEMORY) $(BIN)/python -W ignore tools/demo.py

demo-comparison: $(STAMP)
	@$(KEEP_MEMORY) $(BIN)/python -W ignore tools/demo.py --comparison

test: lint
	@$(KEEP_MEMORY) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu"

coverage: $(STAMP)
	@$(PIP) install --quiet --editable ".[coverage]"
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu" --cov --cov-report term-missing:skip-covered

test-detection: $(DETECTION_STAMP)
	@$(DETECTION_BIN)/python -m pytest tests/test_detection

$(DETECTION_STAMP): $(STAMP) requirements-detection.txt tools/build_mmcv.sh
	@echo "setting up $(DETECTION) over $(VENV): compiles MMCV's operators, 5 minutes of processor time"
	@$(BIN)/python -m venv --clear --without-pip $(DETECTION)
	@$(BIN)/python -c "import sysconfig; p = sysconfig.get_path('purelib'); print('import site; site.addsitedir(%r)' % p)" \
		> $$($(DETECTION_BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	@$(subst $(BIN),$(DETECTION_BIN),$(PIP)) install --quiet --no-deps -r requirements-detection.txt
	@PYTHON=$(DETECTION_BIN)/python bash tools/build_mmcv.sh build/mmcv
	@$(subst $(BIN),$(DETECTION_BIN),$(PIP)) install --quiet --no-deps --ignore-installed build/mmcv/onedl_mmcv-*.whl
	@echo $$(( $$(date +%s) - $(START) )) > $@
	@echo "set up $(DETECTION) in $$(cat $@) s"

research: $(RESEARCH_STAMP)
	@echo "next: $(RESEARCH_BIN)/snakemake -s research/Snakefile -n --config table=digits/objectives"

test-research: $(RESEARCH_STAMP)
	@$(RESEARCH_BIN)/python -m pytest research/tests/test_snakemake.py research/tests/test_slurm.py

$(RESEARCH_STAMP): $(STAMP) research/requirements.txt
	@echo "setting up $(RESEARCH) over $(VENV)"
	@$(BIN)/python -m venv --clear --without-pip $(RESEARCH)
	@$(BIN)/python -c "import sysconfig; p = sysconfig.get_path('purelib'); print('import site; site.addsitedir(%r)' % p)" \
		> $$($(RESEARCH_BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	@$(subst $(BIN),$(RESEARCH_BIN),$(PIP)) install --quiet -r research/requirements.txt
	@touch $@

test-openmmlab: $(OPENMMLAB_STAMP)
	@$(OPENMMLAB_BIN)/python -m pytest -rs -n $(JOBS) --dist worksteal -m "not slow and not gpu"

$(OPENMMLAB_STAMP): requirements-openmmlab.txt
	@echo "installing the frozen packages into $(OPENMMLAB): 6 GB"
	@$(OPENMMLAB_PYTHON) -m venv --clear $(OPENMMLAB)
	@$(subst $(BIN),$(OPENMMLAB_BIN),$(PIP)) install --quiet --no-deps -r $<
	@test -f $(MMCV_WHEEL) || { echo "compiling MMCV's operators, once: 3 minutes of processor time"; \
		PYTHON=$(OPENMMLAB_BIN)/python bash tools/build_mmcv.sh $(MMCV_CACHE) mmcv==2.1.0; }
	@$(subst $(BIN),$(OPENMMLAB_BIN),$(PIP)) install --quiet --no-deps $(MMCV_WHEEL)
	@$(subst $(BIN),$(OPENMMLAB_BIN),$(PIP)) install --quiet --no-deps --no-build-isolation --editable .
	@echo $$(( $$(date +%s) - $(START) )) > $@
	@echo "set up $(OPENMMLAB) in $$(cat $@) s"

test-newest:
	@"$(PYTHON)" -m venv --clear $(NEWEST)
	@$(subst $(BIN),$(NEWEST_BIN),$(PIP)) install --quiet --editable ".[onedl,faiss-cpu,digits,report,onnx,dev]"
	@echo "set up $(NEWEST) in $$(( $$(date +%s) - $(START) )) s"
	@$(NEWEST_BIN)/python -m pip freeze | grep -iE "^(torch|torchvision|onedl|timm|transformers|open_clip|numpy)"
	@$(NEWEST_BIN)/python -m pytest -q -m "private and not slow and not gpu" tests; \
	failed=$$?; $(NEWEST_BIN)/python -W ignore tools/demo.py && exit $$failed

docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/python -m mkdocs build --quiet
	@echo "wrote build/site; next: open build/site/index.html"

# The sources are read, not imported, so the extra's own packages are enough.
$(DOCS_STAMP): pyproject.toml
	@echo "setting up $(DOCS): 170 MB"
	@"$(PYTHON)" -m venv --clear $(DOCS)
	@sed -n 's/^docs = \["\(.*\)"\]$$/\1/p' pyproject.toml | sed 's/", "/\n/g' > $(DOCS)/requirements.txt
	@$(subst $(BIN),$(DOCS_BIN),$(PIP)) install --quiet -r $(DOCS)/requirements.txt
	@touch $@

bench-gpu: $(STAMP)
	@PYTHON=$(CURDIR)/$(BIN)/python bash tools/benchmarks/gpu.sh $(if $(AUTHORS),--authors "$(AUTHORS)") $(PARTS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock:
	@printf '%s\n' $(TORCH) | uv pip compile --quiet --universal --python-version 3.10 \
		--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
		--output-file requirements.lock requirements.txt -

clean:
	rm -rf $(VENV) $(DETECTION) $(RESEARCH) $(OPENMMLAB) $(NEWEST) $(DOCS) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
