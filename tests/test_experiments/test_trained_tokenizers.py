"""Tables run what trains a tokenizer's network before its tokens, from one round of tokens to the next."""

import os

import pytest
from config_building import ROOT

from mapet_mm.experiments import fill
from mapet_mm.experiments.fill import TableFiller
from mapet_mm.experiments.plan import Plan, Run, _Planner, plan_table
from mapet_mm.experiments.table import DeclarationError, load_table

DATA = "fashion_mnist_20000"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def steps(plan: Plan, row: str) -> list[tuple[str, str | None]]:
    """What is run for a row's first column, in order: the config, or the tool, and the dataset."""
    cell = next(cell for cell in plan.cells if cell.row == row)
    return [
        (os.path.basename(run.config or run.command[0]).split("_")[0].removesuffix(".py"), run.data)
        for run in plan.closure([cell.run])
    ]


def test_a_round_of_bootstrapping_is_made_from_the_round_before(tmp_path):
    plan = plan_table(load_table("rounds", DATA), [0], tmp_path)
    rounds = [f"{DATA}_round{number}" for number in range(3)]
    tokens = [[("grid", data), ("grid", data), ("mapet", data)] for data in rounds]
    data, probe = [("fashion", None)], [("vit-micro", DATA)]
    assert steps(plan, "round 0, 5 epochs") == data + tokens[0] + probe
    assert steps(plan, "round 2, 5 epochs") == data + tokens[0] + tokens[1] + tokens[2] + probe
    clip = [("clip", DATA), ("kclip", DATA), ("kclip", DATA), ("mapet", DATA)]
    assert steps(plan, "MaPeT") == data + clip + probe
    folders = {run.outputs[0] for run in plan.runs if run.name.endswith("_tokenizer")}
    assert folders == {
        f"work_dirs/{rounds[1]}/previous_round/epoch_5.pth",
        f"work_dirs/{rounds[2]}/previous_round/epoch_5.pth",
        f"work_dirs/{DATA}/clip/epoch_2.pth",
    }


def test_the_teacher_is_trained_before_its_pupil(tmp_path):
    plan = plan_table(load_table("tokenizer_choice", DATA), [0], tmp_path)
    order = ["fashion", "clip", "vqkd-training", "vqkd", "token-mlp"]
    assert [step for step, _ in steps(plan, "VQ-KD")] == order
    assert steps(plan, "k-means of pixels")[-1] == ("token-mlp", f"{DATA}_round0")
    assert not [run for run in plan.runs if run.kind == "pre-training"]


def test_a_training_that_ends_with_another_checkpoint_is_refused(tmp_path):
    planner = _Planner(load_table("tokenizers", DATA), str(tmp_path))
    training = dict(config="configs/micro/clip_1xb128-coslr.py", checkpoint="work_dirs/clip/epoch_9.pth")
    with pytest.raises(DeclarationError, match=r"epoch_9.pth` is to be made by .*, which ends with epoch_2"):
        planner._trained_by(training, DATA)


def test_the_minutes_of_a_tokenizer_are_those_of_all_that_made_its_tokens(tmp_path, monkeypatch):
    """A minute each: CLIP, VQ-KD and extraction; pixels need a codebook and extraction alone."""

    def record(run: Run) -> dict:
        return dict(metrics={"accuracy/top1": 50.0}, seconds=60.0)

    monkeypatch.setattr(fill, "record_of", record)
    filler = TableFiller(load_table("tokenizer_choice", DATA), [0], tmp_path)
    cells, column = filler.cells(), "training, codebook, extraction (minutes)"
    assert cells["VQ-KD", column].mean == 3
    assert cells["k-means of pixels", column].mean == 2
    assert cells["k-means of pixels", "MLP on the tokens (top-1, %)"].mean == 50
