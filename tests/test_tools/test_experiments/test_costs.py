"""What pre-trainings of the garments' tables compute, go on from and hand on, on four images with tokens."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from config_building import ROOT
from digits_tokenizer import write_few_digits
from experiments import fill
from experiments.declaration import load_table
from experiments.fill import TERAFLOPS, TableFiller, teraflops_of
from experiments.plan import Cell, Run
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import save_checkpoint
from PIL import Image
from tiny_training import read_checkpoint, run_tool

from mapet_mm.models.flops import backbone_step_flops, training_flops
from mapet_mm.tokenizers import TokenStore
from mapet_mm.utils.config import VARIABLE, read_config

DATA = "fashion_mnist_20000"
MAPET = "configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py"
GOING_ON = "round 1, going on from round 0, 5 + 5 epochs"


@pytest.fixture(scope="module")
def garments(tmp_path_factory) -> Path:
    """A folder with the configs, four garments in each split and their tokens."""
    folder = tmp_path_factory.mktemp("garments")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "tools").symlink_to(ROOT / "tools")
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
    tokens = TokenStore.create(store, names, (7, 7), 256, "made up", data_root="data/fashion_mnist")
    tokens.write(np.arange(8), np.arange(8 * 49).reshape(8, 7, 7) % 256)
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(garments, monkeypatch):
    monkeypatch.chdir(garments)


@cache
def filler(table: str) -> TableFiller:
    return TableFiller(load_table(table, DATA), [0], "out")


def cells(table: str, row: str) -> list[Cell]:
    return [cell for cell in filler(table).plan.cells if cell.row == row]


def pretraining(table: str, row: str) -> Run:
    """The last pre-training that a row stands on."""
    needed = filler(table).plan.closure([cells(table, row)[0].run])
    return [run for run in needed if run.kind == "pre-training"][-1]


def test_a_trainings_flops_are_those_of_its_steps():
    """MIM computes no score that it masks, so its count is the minimum: of 5 epochs of 4 images."""
    cfg = read_config(MAPET.replace("mapet_", "mim_"), DATA)
    expected = backbone_step_flops(MODELS.build(cfg.model).backbone, vocab_size=256)
    assert training_flops(cfg) == 5 * 4 * expected
    cfg.train_cfg = dict(max_iters=3)
    assert training_flops(cfg, processes=2) == 3 * 2 * 32 * expected


def test_rows_of_equal_compute_cost_what_mapet_costs_to_the_nearest_epoch():
    mapet = teraflops_of(pretraining("objectives", "MaPeT"))
    for name, epochs in (("MIM", 11), ("BEiT", 10)):
        equal = teraflops_of(pretraining("objectives", f"{name}, equal compute"))
        assert abs(equal - mapet) < equal / epochs / 2
    assert mapet / equal == pytest.approx(10.0 / 10, abs=0.005)


def test_seeds_and_starts_share_a_count(monkeypatch):
    counted = []
    monkeypatch.setattr("mapet_mm.models.flops.training_flops", lambda cfg, _: counted.append(cfg) or 3e12)
    fill._teraflops.cache_clear()
    runs = [pretraining("rounds", "round 1, 5 epochs"), pretraining("rounds", GOING_ON)]
    runs.append(replace(runs[0], command=(*runs[0].command[:-1], "randomness.seed=1")))
    assert [teraflops_of(run) for run in runs] == [3.0] * 3
    assert len(counted) == 1
    fill._teraflops.cache_clear()


def test_what_a_row_goes_on_from_is_part_of_its_cost_and_missing_images_leave_a_gap(monkeypatch):
    cell = replace(cells("rounds", GOING_ON)[0], metric=TERAFLOPS)
    monkeypatch.setattr(fill, "record_of", lambda run: dict(metrics={}, seconds=60))
    monkeypatch.setattr(fill, "teraflops_of", lambda run: 2.0)
    measured = filler("rounds")._metrics(cell)
    assert (measured[TERAFLOPS], measured["pre-training/minutes"]) == (4.0, 2.0)

    def no_images(run):
        raise FileNotFoundError

    monkeypatch.setattr(fill, "teraflops_of", no_images)
    assert TERAFLOPS not in filler("rounds")._metrics(cell)


def test_going_on_takes_the_backbone_of_the_round_before_and_a_new_head():
    run = pretraining("rounds", GOING_ON)
    start = pretraining("rounds", "round 0, 5 epochs")
    words = [word for word in run.command if ".init_cfg." in word]
    assert words[-1] == f"model.backbone.init_cfg.checkpoint={start.outputs[0]}"
    cfg = read_config(MAPET, DATA)
    before = MODELS.build(cfg.model)
    before.init_weights()
    save_checkpoint(before.state_dict(), start.outputs[0])
    cfg.merge_from_dict(dict(word.split("=", 1) for word in words))
    after = MODELS.build(cfg.model)
    after.init_weights()
    same = {name: torch.equal(value, before.state_dict()[name]) for name, value in after.state_dict().items()}
    assert all(same[name] for name in same if name.startswith("backbone."))
    assert not same["head.projection.weight"]


@pytest.mark.parametrize(
    ("seeds", "words"),
    [([0], "Seed 0 only"), ([0, 1], "Mean ± sample standard deviation over the seeds 0, 1")],
)
def test_a_table_of_one_seed_names_no_mean(seeds, words):
    facts = TableFiller(load_table("objectives", DATA), seeds, "out").facts()
    assert facts[0] == f"{words}; the last validation of each training, no selection; the best in bold."


def test_what_was_pre_trained_on_garments_is_probed_on_the_smaller_digits(tmp_path, monkeypatch):
    """7 x 7 patches become 6 x 6, and the probe trains."""
    write_few_digits(tmp_path / "data/digits", 20)
    monkeypatch.setenv(VARIABLE, "digits")
    before = MODELS.build(read_config(MAPET, DATA).model).backbone
    before.init_weights()
    save_checkpoint({f"backbone.{k}": v for k, v in before.state_dict().items()}, f"{tmp_path}/start.pth")
    run = cells("transfer", "MaPeT")[1].run
    assert run.data == "digits"
    short = ["train_cfg.max_epochs=1", "param_scheduler.0.end=1"]
    roots = [
        f"{loader}_dataloader.dataset.data_root={tmp_path / 'data/digits'}" for loader in ("train", "val")
    ]
    checkpoint = f"model.backbone.init_cfg.checkpoint={tmp_path / 'start.pth'}"
    options = ["--cfg-options", *short, *roots, checkpoint]
    run_tool(monkeypatch, "train", run.config, "--work-dir", tmp_path / "probe", *options)
    weights = read_checkpoint(tmp_path / "probe", 1)["state_dict"]
    assert weights["backbone.pos_embed"].shape == (1, 37, 96)
    last = "backbone.layers.3.ffn.layers.1.weight"
    assert torch.equal(weights[last], before.state_dict()[last.removeprefix("backbone.")])
