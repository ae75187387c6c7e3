"""From tables to the runs that fill them, with each pre-training, token store and evaluation once.

A run's folder ends in a digest of its command, its config, the runs that it needs and the package's version,
so a run never picks up the outputs of another recipe.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from experiments.declaration import Column, DeclarationError, Row, TableDeclaration
from mmengine.config import Config

from mapet_mm import __version__
from mapet_mm.evaluation import VERSION
from mapet_mm.utils.config import VARIABLE, nodes, read_config
from mapet_mm.utils.identity import digest

TRAIN = "tools/train.py"
EVALUATE = "tools/evaluate_features.py"  # for a config with a section `evaluation` instead of a training
RESULTS, FEATURES = "results.json", "features"  # figures and cache of an evaluation
SECTION = "evaluation"
# The parts of a config that name what a run reads and starts from.
PARTS = ("model", "train_dataloader", "val_dataloader", SECTION)


@dataclass(frozen=True)
class Run:
    """One command of a plan."""

    name: str  # shown to people
    kind: str  # 'data', 'tokenizer', 'pre-training' or 'evaluation'
    command: tuple[str, ...]  # a tool and its arguments, as typed after `python`
    outputs: tuple[str, ...]  # files or folders that exist once it is done
    folder: str = ""  # <folder of all runs>/<name>-<digest>: its claim, its log, a training's work dir
    needs: tuple[str, ...] = ()  # folders of the runs before it
    config: str | None = None  # the config to train or tokenise with
    data: str | None = None  # the dataset that its config is read for, None without a config
    processes: int = 1  # the number that the recipe is meant for

    @property
    def line(self) -> str:
        """The command as typed for one process."""
        return self.typed(["python", *self.command])

    def typed(self, words: Sequence[str]) -> str:
        """A command line that starts this run, with the variable that selects its dataset."""
        return (f"{VARIABLE}={shlex.quote(self.data)} " if self.data else "") + shlex.join(words)


@dataclass(frozen=True)
class Cell:
    """One number of a table for one seed: row name, column heading, and the run that measures it."""

    row: str
    column: str
    seed: int
    run: Run
    metric: str


@dataclass(frozen=True)
class Plan:
    """The runs of a table, each after the runs that it needs, and the cells that they fill."""

    runs: Sequence[Run]
    cells: Sequence[Cell]

    def closure(self, wanted: Iterable[Run]) -> list[Run]:
        """These runs and all runs that they need, in order."""
        folders = {run.folder for run in wanted}
        for run in reversed(self.runs):
            if run.folder in folders:
                folders.update(run.needs)
        return [run for run in self.runs if run.folder in folders]


def plan_table(table: TableDeclaration, seeds: Iterable[int], out: str | os.PathLike) -> Plan:
    """Resolve a table, with every cell once per seed; the runs go into the folder `<out>/runs`.

    Raises:
        DeclarationError: a config does not exist, neither row nor column fills a pair of braces, or configs
            do not fit together.
    """
    planner = _Planner(table, f"{out}/runs")
    cells = []
    for seed, row, column in product(seeds, table.rows, table.columns):
        if row.columns is None or column.name in row.columns:
            metric = column.metric.format(**{**column.values, **row.values})
            cells.append(Cell(row.name, column.heading, seed, planner.evaluation(row, column, seed), metric))
    return Plan(list(planner.runs.values()), cells)


def identity(command: Sequence[str], needs: Sequence[str], folder: str, config: Config | None = None) -> str:
    """Digest of what decides a run's outputs: command, full config, the runs that it needs, the version.

    The location of the folder of runs is left out, so the folder may be moved.
    """
    runs = os.path.dirname(folder)
    words = [word.replace(folder, "{run}").replace(runs, "{runs}") for word in command]
    settings = None if config is None else config.to_dict()
    return digest([__version__, words, settings, sorted(map(os.path.basename, needs))])[:12]


def final_checkpoint(cfg: Config) -> str:
    """Name of the checkpoint that a training with this config writes last."""
    loop = cfg.get("train_cfg") or {}
    for key, name in (("max_epochs", "epoch"), ("max_iters", "iter")):
        if key in loop:
            return f"{name}_{loop[key]}.pth"
    raise DeclarationError(f"`{cfg.filename}` has no length in `train_cfg`: it cannot be trained")


class _Planner:
    """Makes the runs of a table; `runs` has each of them once, by folder."""

    def __init__(self, table: TableDeclaration, folder: str) -> None:
        self.table, self.folder = table, folder
        self.runs: dict[str, Run] = {}
        self.read = cache(read_config)

    def evaluation(self, row: Row, column: Column, seed: int) -> Run:
        """The run that measures a cell."""
        values = {**column.values, **row.values}
        config = _existing(column.config, values, column.name)
        # Without a pre-training, a row's dataset is that of its tokens.
        data = (column.data or (None if row.pretrain else row.data) or self.table.dataset).format(seed=seed)
        tokenizer = _existing(row.tokenizer, values, row.name)
        cfg = self._merged(config, data, column.options)
        dicts = [(key, node) for key, node in nodes(cfg.get("model"), "model") if isinstance(node, dict)]
        slots = [key for key, node in dicts if "checkpoint" in node and not node["checkpoint"]]
        start, needs, handed_on = f"scratch_seed-{seed}", [], dict.fromkeys(slots)
        if row.pretrain:
            needs = [self._pretraining(row, column, seed)]
            if len(slots) != 1:
                raise DeclarationError(
                    f"{column.name!r}: `{config}` leaves {len(slots)} `checkpoint` of its model open, "
                    "and a pre-training is handed on in one"
                )
            handed_on, start = {f"{slots[0]}.checkpoint": needs[0].outputs[0]}, needs[0].name
        needs += self._tokens(tokenizer, cfg, data) + self._data(column.source)
        name = "_".join(filter(None, [Path(config).stem, column.data])) + _suffix(column.options)
        changes = {**column.options, **handed_on, "randomness.seed": seed}
        return self._run_config(f"{name}--{start}", "evaluation", cfg, changes, needs, data)

    def _pretraining(self, row: Row, column: Column, seed: int) -> Run:
        """The run of a row's pre-training, after that of the row which it continues."""
        values = {**column.values, **row.values}
        config = _existing(row.pretrain, values, row.name)
        tokenizer = _existing(row.tokenizer, values, row.name)
        data = (row.data or self.table.dataset).format(seed=seed)
        cfg = self._merged(config, data, row.options)
        needs = self._tokens(tokenizer, cfg, data)
        if tokenizer and not needs:
            raise DeclarationError(f"{row.name!r}: `{config}` reads no tokens of `{tokenizer}`")
        name, changes = f"{Path(config).stem}{_suffix(row.options)}", dict(row.options)
        if row.start:
            if isinstance(cfg.model.backbone.get("init_cfg"), list):
                raise DeclarationError(f"{row.name!r}: `{config}` has a list in `model.backbone.init_cfg`")
            start = next(other for other in self.table.rows if other.name == row.start)
            needs = [self._pretraining(start, column, seed), *needs]
            # The backbone alone: the head predicts other tokens.
            handed_on = {"type": "Pretrained", "prefix": "backbone.", "checkpoint": needs[0].outputs[0]}
            changes |= {f"model.backbone.init_cfg.{key}": value for key, value in handed_on.items()}
            name += "_going-on"
        changes["randomness.seed"] = seed
        return self._run_config(f"{name}_seed-{seed}", "pre-training", cfg, changes, needs, data)

    def _run_config(
        self, name: str, kind: str, cfg: Config, changes: Mapping[str, Any], needs: Sequence[Run], data: str
    ) -> Run:
        """The run that trains with a config, or evaluates as it says."""
        if SECTION in cfg and not cfg.get("train_cfg"):
            command = [EVALUATE, cfg.filename, "--out", "{run}", "--cache", f"{{run}}/{FEATURES}"]
            output = RESULTS
            # Figures of earlier protocols are of other runs.
            changes = {**changes, f"{SECTION}.version": VERSION}
        else:
            command = [TRAIN, cfg.filename, "--work-dir", "{run}", "--resume"]
            output = final_checkpoint(cfg)
        # The number of processes that gives the total batch size of the learning rate.
        batch = (cfg.get("train_dataloader") or {}).get("batch_size", 1)
        batch *= (cfg.get("optim_wrapper") or {}).get("accumulative_counts", 1)
        processes = max(1, (cfg.get("auto_scale_lr") or {}).get("base_batch_size", 0) // batch)
        words = (*command, "--cfg-options", *(f"{key}={value}" for key, value in changes.items()))
        run = Run(name, kind, words, (f"{{run}}/{output}",), config=cfg.filename, processes=processes)
        return self._add(run, needs or self._data(self.table.data), self.read(cfg.filename, data))

    def _data(self, source: Mapping[str, Sequence[str]]) -> list[Run]:
        if "command" not in source:
            return []
        return [self._add(Run("data", "data", source["command"], source.get("outputs", ())), [])]

    def _tokens(self, tokenizer: str | None, reader: Config, data: str) -> list[Run]:
        """The runs that make a tokenizer's codebook and token store, as far as this config reads them."""
        if tokenizer is None:
            return []
        cfg = self.read(tokenizer, data)
        named = (node for part in PARTS for _, node in nodes(reader.get(part)))
        read = {os.path.normpath(node) for node in named if isinstance(node, str)}
        tools = []
        reads_tokens = os.path.normpath(cfg.token_store) in read
        codebook = cfg.tokenizer.get("codebook") if cfg.get("codebook") else None
        if codebook and (reads_tokens or os.path.normpath(codebook) in read):
            tools.append(("fit_codebook", codebook))
        if reads_tokens:
            tools.append(("extract_tokens", cfg.token_store))
        made = self._trained_by(cfg.get("trained_by"), data) if tools else []
        for tool, output in tools:
            name, gpus = f"{tool}_{Path(tokenizer).stem}", max(1, self.table.runner.gpus_per_node)
            run = Run(name, "tokenizer", (f"tools/{tool}.py", tokenizer), (output,), config=tokenizer)
            made = [self._add(replace(run, processes=gpus), made or self._data(self.table.data), cfg)]
        return made

    def _trained_by(self, training: Mapping[str, str] | None, data: str) -> list[Run]:
        """The training of a tokenizer's own network: its `config` and final `checkpoint`.

        It also has its `tokenizer`, if it reads tokens, and its `data`, if that is not the tokenizer's.
        """
        if not training:
            return []
        config, checkpoint = training["config"], training["checkpoint"]
        data = training.get("data", data)
        cfg = self.read(config, data)
        needs = self._tokens(training.get("tokenizer"), cfg, data)
        needs = needs or self._trained_by(cfg.get("trained_by"), data)
        command = (TRAIN, config, "--work-dir", os.path.dirname(checkpoint), "--resume")
        run = Run(f"{Path(config).stem}_tokenizer", "tokenizer", command, (checkpoint,), config=config)
        return [self._add(run, needs or self._data(self.table.data), cfg)]

    def _add(self, run: Run, needs: Sequence[Run], cfg: Config | None = None) -> Run:
        """Add the run with its folder, which replaces `{run}` in it; `cfg` is its config as in the file."""
        before = tuple(need.folder for need in needs)
        folder = f"{self.folder}/{run.name}-{identity(run.command, before, f'{self.folder}/{{run}}', cfg)}"
        words, outputs = (
            tuple(word.replace("{run}", folder) for word in words) for words in (run.command, run.outputs)
        )
        data = cfg.env_variables.get(VARIABLE) if cfg else None
        run = replace(run, command=words, outputs=outputs, folder=folder, needs=before, data=data)
        return self.runs.setdefault(folder, run)

    def _merged(self, config: str, data: str, options: Mapping[str, Any]) -> Config:
        cfg = deepcopy(self.read(config, data))
        cfg.merge_from_dict(dict(options))
        return cfg


def _existing(template: str | None, values: Mapping[str, str], owner: str) -> str | None:
    """The config that a row or a column, the owner, names with braces; None if it names none."""
    if not template:
        return None
    try:
        path = template.format(**values)
    except KeyError as error:
        raise DeclarationError(f"{owner!r}: no value for {{{error.args[0]}}} of `{template}`") from error
    if not Path(path).is_file():
        raise DeclarationError(f"{owner!r} names the config `{path}`, which does not exist")
    return path


def _suffix(options: Mapping[str, Any]) -> str:
    """Options as part of a file name: `_cutting_point-30`."""
    parts = (f"_{key.rsplit('.', 1)[-1]}-{value}" for key, value in options.items())
    return re.sub(r"[^\w.=-]", "-", "".join(parts))
