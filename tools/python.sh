# Sets PYTHON, if it is not set: the active environment's, or that of `make setup` where none with MMEngine is active.
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python
    if [ -x "$TOOLS/../.venv/bin/python" ] &&
        ! python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("mmengine") is None)' 2>/dev/null; then
        PYTHON=$TOOLS/../.venv/bin/python
    fi
fi
