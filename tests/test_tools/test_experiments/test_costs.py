"""Costs of rows: teraflops counted once, on garments with tokens, and minutes from records."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import flops
import numpy as np
import pytest
from config_building import ROOT
from experiments import fill
from experiments.declaration import load_table
from experiments.fill import TERAFLOPS, TableFiller, teraflops_of
from experiments.plan import Cell, Run
from PIL import Image

from mapet_mm.tokenizers import TokenStore

DATA = "fashion_mnist_20000"
GOING_ON = "round 1, going on from round 0, 5 + 5 epochs"


@pytest.fixture(scope="module")
def garments(tmp_path_factory) -> Path:
    """A folder with the configs, four garments in each split and their tokens."""
    folder = tmp_path_factory.mktemp("garments")
    for name in ("configs", "tools"):
        (folder / name).symlink_to(ROOT / name)
    data, names = folder / "data/fashion_mnist", []
    (data / "meta").mkdir(parents=True)
    for split, listed in (("train", "train_20000"), ("val", "val")):
        (data / split).mkdir()
        for number in range(4):
            names.append(f"{split}/{number}.png")
            Image.fromarray(np.full((28, 28), 60 * number, np.uint8)).save(data / names[-1])
        (data / f"meta/{listed}.txt").write_text("".join(f"{number}.png {number}\n" for number in range(4)))
    store = folder / "work_dirs/fashion_mnist_20000/tokens"
    store.parent.mkdir(parents=True)
    store.parent.with_name("fashion_mnist_20000_tokens0").symlink_to(store.parent)
    tokens = TokenStore.create(store, names, (7, 7), 256, "made up", data_root="data/fashion_mnist")
    tokens.write(np.arange(8), np.arange(8 * 49).reshape(8, 7, 7) % 256)
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(garments, monkeypatch):
    monkeypatch.chdir(garments)


@cache
def filler(table: str) -> TableFiller:
    return TableFiller(load_table(table, DATA), [0], "out")


def first_cell(table: str, row: str) -> Cell:
    return next(cell for cell in filler(table).plan.cells if cell.row == row)


def pretraining(table: str, row: str) -> Run:
    """The last pre-training that a row stands on."""
    needed = filler(table).plan.closure([first_cell(table, row).run])
    return [run for run in needed if run.kind == "pre-training"][-1]


def test_rows_of_equal_compute_cost_what_mapet_costs_within_a_tenth():
    mapet = teraflops_of(pretraining("objectives", "MaPeT"))
    rows = [row.name for row in load_table("objectives", DATA).rows if row.name.endswith(", equal compute")]
    assert len(rows) == 5
    for name in rows:
        assert teraflops_of(pretraining("objectives", name)) == pytest.approx(mapet, rel=0.1), name


def test_a_training_is_counted_once_and_its_record_says_so(monkeypatch):
    run = pretraining("objectives", "MIM")
    file = Path(run.folder).parents[1] / f"results/{Path(run.folder).name}.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(dict(metrics={}, made={}, seconds=60, machine="any")))
    counted = teraflops_of(run)
    assert json.loads(file.read_text())["teraflops"] == counted > 0
    monkeypatch.setattr(flops, "training_flops", None)
    assert teraflops_of(run) == counted


def test_the_round_before_is_part_of_a_rows_cost_and_missing_tokens_leave_a_gap(monkeypatch):
    place = next((c.row, c.column) for c in filler("rounds").plan.cells if c.row == GOING_ON)
    plan = filler("rounds").plan
    cells = [replace(cell, metric=TERAFLOPS) for cell in plan.cells if (cell.row, cell.column) == place]
    one = TableFiller(load_table("rounds", DATA), [0], "out")
    one.plan = replace(plan, cells=cells)
    record = dict(metrics={}, seconds=60, made={}, machine="any", teraflops=2.0)
    monkeypatch.setattr(fill, "record_of", lambda run: record)
    assert one.cells()[place].mean == 4.0
    del record["teraflops"]  # and here are no tokens of rounds to count by
    assert one.cells()[place] == f"no `{TERAFLOPS}`"
