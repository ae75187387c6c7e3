"""From a table to the runs that fill it, with each pre-training, token store and evaluation once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mmengine.config import Config

from lab.identity import identity_of
from lab.paths import RUNS, data_variables
from lab.runs import TRAIN, Run
from lab.tables import Column, Data, DeclarationError, Row, Table
from mapet_mm.evaluation import VERSION
from mapet_mm.utils.config import nodes, read_config

FROZEN = "tools/evaluate_features.py"  # for a config with a section `evaluation` instead of a training
USAGE = "research/measure_tokens.py"  # how a token store uses its ids
RESULTS = "results.json"
FEATURES = "features"  # cache of an evaluation
SECTION = "evaluation"
# The parts of a config that name what a run reads and starts from.
PARTS = ("model", "train_dataloader", "val_dataloader", SECTION)


@dataclass(frozen=True)
class Cell:
    """One number of a table for one seed: row name, column heading, and the run that measures it."""

    row: str
    column: str
    seed: int
    run: str  # its key
    metric: str


@dataclass(frozen=True)
class Plan:
    """The runs of a table by their keys, each after the runs that it needs, and the cells that they fill."""

    runs: Mapping[str, Run]
    cells: Sequence[Cell]

    def with_needs(self, keys: Iterable[str]) -> list[Run]:
        """These runs and all runs that they need, in order."""
        wanted = set(keys)
        for key in reversed(list(self.runs)):
            if key in wanted:
                wanted.update(self.runs[key].needs)
        return [run for key, run in self.runs.items() if key in wanted]


def plan_table(table: Table, seeds: Iterable[int], evaluation: int = VERSION) -> Plan:
    """Resolve a table, with every cell once per seed.

    Args:
        table: as `load_table` reads it.
        seeds: of the runs.
        evaluation: version of the frozen protocols; of another one than today's, records can be shown.

    Raises:
        DeclarationError: a config does not exist, neither row nor column fills a pair of braces, or configs
            do not fit together.
    """
    planner = _Planner(table, evaluation)
    cells = []
    for seed in seeds:
        for row in table.run_rows:
            for column in table.columns:
                if row.columns is None or column.name in row.columns:
                    run = planner.evaluation_run(row, column, seed)
                    metric = column.metric.format(**{**column.values, **row.values})
                    cells.append(Cell(row.name, column.heading, seed, run.key, metric))
    return Plan(planner.runs, cells)


@cache
def config_of(path: str, data: str | None) -> Config:
    """A config as read for a dataset; not to be changed."""
    with patch.dict(os.environ, data_variables(data) if data else {}):
        return read_config(path)


def changed_config(path: str, data: str | None, options: Mapping[str, Any]) -> Config:
    """A config of one's own, with options merged."""
    cfg = deepcopy(config_of(path, data))
    cfg.merge_from_dict(dict(options))
    return cfg


def final_checkpoint(cfg: Config) -> str:
    """Name of the checkpoint that a training with this config writes last."""
    loop = cfg.get("train_cfg") or {}
    for key, name in (("max_epochs", "epoch"), ("max_iters", "iter")):
        if key in loop:
            return f"{name}_{loop[key]}.pth"
    raise DeclarationError(f"`{cfg.filename}` has no length in `train_cfg`: it cannot be trained")


def processes_of(cfg: Config) -> int:
    """The number of processes that gives the total batch size of the learning rate."""
    batch = (cfg.get("train_dataloader") or {}).get("batch_size", 1)
    batch *= (cfg.get("optim_wrapper") or {}).get("accumulative_counts", 1)
    return max(1, (cfg.get("auto_scale_lr") or {}).get("base_batch_size", 0) // batch)


def current_identity(run: Run) -> str:
    """The identity that a run has by its config as it is now."""
    if run.kind == "data":
        return identity_of(run.kind, data_content(run.command[0]))
    cfg = changed_config(run.config, run.data, run.options).to_dict() if run.config else {}
    return identity_of(run.kind, cfg, list(map(id_of, run.needs)), run.seed, run.evaluation)


def id_of(key: str) -> str:
    """The identity at the end of a run's key."""
    return key.rpartition("-")[2]


def data_content(converter: str) -> dict[str, str]:
    """What decides the data that a converter writes: its name, wherever it lies."""
    return {"converter": Path(converter).stem}


class _Planner:
    """Makes the runs of a table; `runs` has each of them once, by key."""

    def __init__(self, table: Table, evaluation: int) -> None:
        self.table = table
        self.version = evaluation
        self.runs: dict[str, Run] = {}
        # What many cells ask for: configs with their options, and pre-trainings.
        self.configs: dict[tuple, Config] = {}
        self.pretrainings: dict[tuple, Run] = {}

    def evaluation_run(self, row: Row, column: Column, seed: int) -> Run:
        """The run that measures a cell."""
        values = {**column.values, **row.values}
        config = _existing(column.config, values, column.name)
        # Without a pre-training, a row's dataset is that of its tokens.
        of_tokens = None if row.pretrain else row.data
        data = (column.data or of_tokens or self.table.dataset).format(seed=seed) or None
        tokenizer = self._tokenizer_of(row, values)
        if column.metric.startswith("tokens/"):
            return self._usage_run(tokenizer, config, data)
        cfg = self._config(config, data, column.options)
        slots = _open_slots(cfg)
        if row.pretrain:
            pretraining = self._pretraining_run(row, column, seed)
            start = pretraining.name
            needs = [pretraining]
            handed_on = {_one_slot(slots, config, column): pretraining.outputs[0]}
        else:
            start = f"scratch_seed-{seed}"
            needs = []
            handed_on = dict.fromkeys(slots)
        needs += self._tokens(tokenizer, cfg, data) + self._data_runs(column.source)
        name = "_".join(filter(None, [Path(config).stem, column.data])) + _suffix(column.options)
        said = dict(data=data, options=column.options, seed=seed)
        return self._config_run(f"{name}--{start}", "evaluation", cfg, needs, handed_on, **said)

    def _config(self, path: str, data: str | None, options: Mapping[str, Any]) -> Config:
        """A config with options merged; not to be changed."""
        key = path, data, str(options)
        if key not in self.configs:
            self.configs[key] = changed_config(path, data, options)
        return self.configs[key]

    def _tokenizer_of(self, row: Row, values: Mapping[str, str]) -> str | None:
        named = self.table.tokenizer if row.tokenizer is None else row.tokenizer
        return _existing(named, values, row.name)

    def _pretraining_run(self, row: Row, column: Column, seed: int) -> Run:
        """The run of a row's pre-training, after that of the row which it continues."""
        key = row.name, str(column.values), seed
        if key not in self.pretrainings:
            self.pretrainings[key] = self._new_pretraining_run(row, column, seed)
        return self.pretrainings[key]

    def _new_pretraining_run(self, row: Row, column: Column, seed: int) -> Run:
        values = {**column.values, **row.values}
        config = _existing(row.pretrain, values, row.name)
        tokenizer = self._tokenizer_of(row, values)
        data = (row.data or self.table.dataset).format(seed=seed) or None
        cfg = self._config(config, data, row.options)
        needs = self._tokens(tokenizer, cfg, data)
        if tokenizer and not needs:
            raise DeclarationError(f"{row.name!r}: `{config}` reads no tokens of `{tokenizer}`")
        needs = needs or self._training_of(cfg.get("trained_by"), data)
        name = f"{Path(config).stem}{_suffix(row.options)}"
        handed_on = {}
        if row.start:
            start = self._start_of(row, cfg, column, seed)
            needs = [start, *needs]
            # The backbone only: the head predicts other tokens.
            weights = {"type": "Pretrained", "prefix": "backbone.", "checkpoint": start.outputs[0]}
            handed_on = {f"model.backbone.init_cfg.{key}": value for key, value in weights.items()}
            name += "_continued"
        said = dict(data=data, options=row.options, seed=seed)
        return self._config_run(f"{name}_seed-{seed}", "pre-training", cfg, needs, handed_on, **said)

    def _start_of(self, row: Row, cfg: Config, column: Column, seed: int) -> Run:
        """The pre-training that a row continues."""
        if isinstance(cfg.model.backbone.get("init_cfg"), list):
            raise DeclarationError(f"{row.name!r}: `{cfg.filename}` has a list in `model.backbone.init_cfg`")
        start = next(other for other in self.table.run_rows if other.name == row.start)
        return self._pretraining_run(start, column, seed)

    def _config_run(
        self,
        name: str,
        kind: str,
        cfg: Config,
        needs: Sequence[Run],
        handed_on: Mapping[str, Any],
        *,
        data: str | None,
        options: Mapping[str, Any],
        seed: int,
    ) -> Run:
        """The run that trains with a config, or evaluates frozen features as it says."""
        needs = needs or self._data_runs(self.table.data)
        is_frozen = SECTION in cfg and not cfg.get("train_cfg")
        version = self.version if is_frozen else None
        identity = identity_of(kind, cfg.to_dict(), [need.id for need in needs], seed, version)
        folder = f"{RUNS}/{name}-{identity}"
        changes = {**options, **handed_on, "randomness.seed": seed}
        if is_frozen:
            changes[f"{SECTION}.version"] = version
            command = [FROZEN, cfg.filename, "--no-random", "--out", folder]
            command += ["--cache", f"{folder}/{FEATURES}"]
            output = f"{folder}/{RESULTS}"
        else:
            command = [TRAIN, cfg.filename, "--work-dir", folder, "--resume"]
            output = f"{folder}/{final_checkpoint(cfg)}"
        command += ["--cfg-options", *(f"{key}={value}" for key, value in changes.items())]
        said = dict(config=cfg.filename, data=data, options=options, seed=seed, evaluation=version)
        return self._add(identity, name, kind, command, output, needs, processes=processes_of(cfg), **said)

    def _usage_run(self, tokenizer: str, config: str, data: str) -> Run:
        """The run that counts how the training images use the tokens that a config trains on."""
        tokens = self._tokens(tokenizer, config_of(config, data), data)
        identity = identity_of("evaluation", {}, [need.id for need in tokens])
        name = f"usage_{Path(tokenizer).stem}"
        output = f"{RUNS}/{name}-{identity}/{RESULTS}"
        return self._add(
            identity, name, "evaluation", [USAGE, config, "--out", output], output, tokens, data=data
        )

    def _data_runs(self, source: Data) -> list[Run]:
        if not source.command:
            return []
        identity = identity_of("data", data_content(source.command[0]))
        name = f"data_{Path(source.command[0]).stem}"
        return [self._add(identity, name, "data", source.command, source.outputs, [])]

    def _tokens(self, tokenizer: str | None, reader: Config, data: str | None) -> list[Run]:
        """The last run that makes a tokenizer's codebook and token store, as far as a config reads them."""
        if tokenizer is None:
            return []
        cfg = config_of(tokenizer, data)
        read = _paths_in(reader)
        reads_tokens = os.path.normpath(cfg.token_store) in read
        codebook = cfg.tokenizer.get("codebook") if cfg.get("codebook") else None
        steps = []
        if codebook and (reads_tokens or os.path.normpath(codebook) in read):
            steps.append(("fit_codebook", codebook))
        if reads_tokens:
            steps.append(("extract_tokens", cfg.token_store))
        made = self._training_of(cfg.get("trained_by"), data) if steps else []
        for tool, output in steps:
            name = f"{tool}_{Path(tokenizer).stem}"
            # On all GPUs of a machine.
            processes = max(1, self.table.gpus_per_node)
            command = [f"tools/{tool}.py", tokenizer]
            made = [self._tokenizer_run(name, cfg, command, output, made, data, processes)]
        return made

    def _training_of(self, training: Mapping[str, str] | None, data: str | None) -> list[Run]:
        """The training of a tokenizer's own network: its `config` and final `checkpoint`.

        It also has its `tokenizer`, if it reads tokens, and its `data`, if that is not the tokenizer's.
        """
        if not training:
            return []
        config = training["config"]
        checkpoint = training["checkpoint"]
        data = training.get("data", data)
        cfg = config_of(config, data)
        needs = self._tokens(training.get("tokenizer"), cfg, data)
        needs = needs or self._training_of(cfg.get("trained_by"), data)
        command = [TRAIN, config, "--work-dir", os.path.dirname(checkpoint), "--resume"]
        return [
            self._tokenizer_run(f"{Path(config).stem}_tokenizer", cfg, command, checkpoint, needs, data, 1)
        ]

    def _tokenizer_run(
        self,
        name: str,
        cfg: Config,
        command: Sequence[str],
        output: str,
        needs: Sequence[Run],
        data: str | None,
        processes: int,
    ) -> Run:
        """The run of one step of a tokenizer."""
        needs = needs or self._data_runs(self.table.data)
        identity = identity_of("tokenizer", cfg.to_dict(), [need.id for need in needs])
        said = dict(config=cfg.filename, data=data, processes=processes)
        return self._add(identity, name, "tokenizer", command, output, needs, **said)

    def _add(
        self,
        identity: str,
        name: str,
        kind: str,
        command: Sequence[str],
        outputs: str | Sequence[str],
        needs: Sequence[Run],
        **said: Any,
    ) -> Run:
        """Add a run, unless another cell has brought it."""
        outputs = [outputs] if isinstance(outputs, str) else outputs
        keys = [need.key for need in needs]
        run = Run(identity, name, kind, command, outputs, keys, folders=self.table.data.folders, **said)
        return self.runs.setdefault(run.key, run)


def _paths_in(cfg: Config) -> set[str]:
    """Every string in the parts of a config that name what a run reads."""
    named = (node for part in PARTS for _, node in nodes(cfg.get(part)))
    return {os.path.normpath(node) for node in named if isinstance(node, str)}


def _open_slots(cfg: Config) -> list[str]:
    """Keys of the dicts in a model that leave their `checkpoint` open."""
    dicts = [(key, node) for key, node in nodes(cfg.get("model"), "model") if isinstance(node, dict)]
    return [key for key, node in dicts if "checkpoint" in node and not node["checkpoint"]]


def _one_slot(slots: Sequence[str], config: str, column: Column) -> str:
    """The key of the one checkpoint that a pre-training is handed on in."""
    if len(slots) != 1:
        raise DeclarationError(
            f"{column.name!r}: `{config}` leaves {len(slots)} `checkpoint` of its model open, "
            "and a pre-training is handed on in one"
        )
    return f"{slots[0]}.checkpoint"


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
