"""Functions that the benchmarks share: options, Markdown tables, and work in a fresh process."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import mapet_mm.utils.logging  # noqa: F401
from mapet_mm.benchmark import machine, table, time_in_turns

__all__ = [
    "DEVICE",
    "ON_GPU",
    "ROOT",
    "fresh",
    "machine",
    "parse_options",
    "report",
    "time_in_turns",
]
ROOT = Path(__file__).parents[2]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def parse_options(description: str, arguments: Sequence[str] | None, **defaults: Any) -> argparse.Namespace:
    """Parse a benchmark's options; each has the type of its default, and several values if that is a list.

    Args:
        description: the script's docstring.
        arguments: the command line; None takes the process's own.
        defaults: by name; if the choices are limited, a pair of the default and the choices.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        default, choices = default if isinstance(default, tuple) else (default, None)
        several = isinstance(default, list)
        kind = type(default[0] if several else default)
        parser.add_argument(
            f"--{name}",
            type=kind,
            default=default,
            choices=choices and list(choices),
            nargs="+" if several else None,
            help="default: %(default)s",
        )
    return parser.parse_args(arguments)


def report(what: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table below its title."""
    print(f"\n{what}\n\n{table(headings, rows)}", flush=True)


def fresh(script: str, arguments: Sequence[Any], environment: Mapping[str, str] | None = None) -> Any:
    """Run a script in a fresh process, and return the last line that it prints, parsed as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )
    return json.loads(done.stdout.splitlines()[-1])
