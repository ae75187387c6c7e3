"""From tables to the commands that fill them: each pre-training, token store and evaluation once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mmengine.config import Config

from mapet_mm.experiments.declaration import Column, DeclarationError, Row, TableDeclaration
from mapet_mm.experiments.stages import Stage

INIT = "model.backbone.init_cfg"


def read_config(path: str) -> Config:
    """A config; read once, a fifth of a second, while its file is not touched."""
    return _read_version(os.path.abspath(path), os.stat(path).st_mtime_ns)


@cache
def _read_version(path: str, modified: int) -> Config:
    return Config.fromfile(path)


@dataclass(frozen=True)
class Run:
    """One command of a plan.

    Args:
        name: what it is, unique over all tables: config, changes and seed, not the table.
        kind: 'data', 'tokenizer', 'pre-training' or 'evaluation'.
        command: a script and its arguments, as typed after `python`.
        outputs: what exists once it is done.
        needs: names of the runs before it.
        config: the config that it trains, None for tools.
        work_dir: where a training writes.
        options: a training's changes to its config.
    """

    name: str
    kind: str
    command: tuple[str, ...]
    outputs: tuple[str, ...]
    needs: tuple[str, ...] = ()
    config: str | None = None
    work_dir: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def stage(self) -> Stage:
        """This run for a `StageRunner`; the time of one says how long those of the same config will take."""
        kind = self.config or self.name
        return Stage(self.name, self.command, self.outputs, self.needs, self.kind != "data", kind)


@dataclass(frozen=True)
class Cell:
    """One number of a table: row's name, column's heading, and the run that gives it, for one seed."""

    row: str
    column: str
    seed: int
    run: str
    metric: str


@dataclass(frozen=True)
class Plan:
    """The runs of some tables, each after those that it needs, and the cells that they fill."""

    runs: Sequence[Run]
    cells: Sequence[Cell]


def plan_table(table: TableDeclaration, seeds: Iterable[int], out: str | os.PathLike) -> Plan:
    """Resolve a table.

    Args:
        table: its declaration.
        seeds: a training of every cell each.
        out: folder of the data set's runs.

    Raises:
        DeclarationError: a config does not exist, or braces that neither row nor column fill.
    """
    runs: dict[str, Run] = {}
    cells = []
    for seed in seeds:
        for row in table.rows:
            for column in table.columns:
                if row.columns is not None and column.name not in row.columns:
                    continue
                if chain := _chain(table, row, column, seed, Path(out)):
                    runs.update((run.name, run) for run in chain)
                    cells.append(Cell(row.name, column.heading, seed, chain[-1].name, column.metric))
    return Plan(list(runs.values()), cells)


def final_checkpoint(config: str, work_dir: str | os.PathLike, options: Mapping[str, Any] = {}) -> str:
    """The checkpoint that a training with this config writes last."""
    loop = {**read_config(config).train_cfg, **_below(options, "train_cfg")}
    name = f"epoch_{loop['max_epochs']}.pth" if "max_epochs" in loop else f"iter_{loop['max_iters']}.pth"
    return str(Path(work_dir) / name)


def _chain(table: TableDeclaration, row: Row, column: Column, seed: int, out: Path) -> list[Run]:
    """The runs of one cell, in order; the last one measures."""
    values = {**column.values, **row.values}
    config = _existing(column.config, values, column.name)
    runs = _data(table)
    tokens = _existing(row.tokenizer, values, row.name) if row.tokenizer else None
    if row.pretrain is None:
        # A classifier of tokens has no backbone that could be initialised, and reads a token store instead.
        reads_tokens = "token" in Path(config).stem.split("_")[0]
        runs += _tokens(tokens, runs) if tokens and reads_tokens else []
        start, options = f"scratch_seed-{seed}", {} if reads_tokens else {INIT: None}
    else:
        runs += _tokens(tokens, runs) if tokens else []
        pretrain = _existing(row.pretrain, values, row.name)
        runs.append(_training(pretrain, row.options, seed, "pre-training", runs, out))
        start = runs[-1].name
        options = {f"{INIT}.checkpoint": runs[-1].outputs[0]}
    changes = {**column.options, **options}
    return [*runs, _training(config, column.options, seed, "evaluation", runs, out, start, changes)]


def _data(table: TableDeclaration) -> list[Run]:
    if "command" not in table.data:
        return []
    return [Run("data", "data", tuple(table.data["command"]), tuple(table.data["outputs"]))]


def _tokens(config: str, before: Sequence[Run]) -> list[Run]:
    """Codebook (where the tokenizer has one to fit) and token store."""
    cfg, stem = read_config(config), Path(config).stem
    needs, runs = tuple(run.name for run in before), []
    if cfg.get("codebook"):
        command = ("tools/fit_codebook.py", config, "--overwrite")
        runs.append(Run(f"codebook_{stem}", "tokenizer", command, (cfg.tokenizer.codebook,), needs))
        needs = (runs[-1].name,)
    runs.append(
        Run(f"tokens_{stem}", "tokenizer", ("tools/extract_tokens.py", config), (cfg.token_store,), needs)
    )
    return runs


def _training(
    config: str,
    options: Mapping[str, Any],
    seed: int,
    kind: str,
    before: Sequence[Run],
    out: Path,
    start: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Run:
    """A training named after its config, its options, where it starts from, and the seed."""
    name = "--".join([Path(config).stem + _suffix(options), *([start] if start else [])])
    name += "" if start else f"_seed-{seed}"
    work_dir = str(out / "runs" / name)
    changes = {**(options if changes is None else changes), "randomness.seed": seed}
    arguments = [f"{key}={value}" for key, value in changes.items()]
    command = ("tools/train.py", config, "--work-dir", work_dir, "--resume", "--cfg-options", *arguments)
    outputs = (final_checkpoint(config, work_dir, options), work_dir)
    needs = tuple(run.name for run in before[-1:])
    return Run(name, kind, command, outputs, needs, config, work_dir, changes)


def _existing(template: str, values: Mapping[str, str], owner: str) -> str:
    try:
        path = template.format(**values)
    except KeyError as error:
        raise DeclarationError(
            f"{owner!r}: nothing stands for {{{error.args[0]}}} of `{template}`"
        ) from error
    if not Path(path).is_file():
        raise DeclarationError(f"{owner!r} names the config `{path}`, which does not exist")
    return path


def _below(options: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The options of one section of a config, without its name."""
    return {key[len(prefix) + 1 :]: value for key, value in options.items() if key.startswith(f"{prefix}.")}


def _suffix(options: Mapping[str, Any]) -> str:
    """Options as a part of a file name: `_cutting_point-30`."""
    parts = (f"_{key.rsplit('.', 1)[-1]}-{value}" for key, value in options.items())
    return re.sub(r"[^\w.=-]", "-", "".join(parts))
