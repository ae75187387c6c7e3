"""From tables to runs: every cell's recipe, what is shared, what is handed on, what trains a tokenizer."""

import dataclasses
import os
import re

import pytest
from config_building import ROOT
from experiments import fill
from experiments.declaration import DeclarationError, list_datasets, list_tables, load_table
from experiments.fill import TableFiller
from experiments.plan import Plan, final_checkpoint, plan_table
from fake_project import PRETRAIN, declare_mine
from mmengine.config import Config

from mapet_mm.evaluation import VERSION
from mapet_mm.utils.config import read_config

GARMENTS = "fashion_mnist_20000"
KCLIP = "configs/micro/kclip.py"
TABLES = [
    (dataset, name)
    for dataset in list_datasets(ROOT / "configs/tables")
    for name in list_tables(dataset, ROOT / "configs/tables")
]


@pytest.fixture(autouse=True)
def _in_the_repository(repository):
    pass


@pytest.mark.parametrize(("dataset", "name"), TABLES)
def test_every_cell_resolves_to_existing_configs(name, dataset):
    table = load_table(name, dataset)
    plan = plan_table(table, [0], "out")
    evaluated = [len(table.columns) if row.columns is None else len(row.columns) for row in table.rows]
    assert len(plan.cells) == sum(evaluated)
    folders = [run.folder for run in plan.runs]
    assert len(set(folders)) == len(folders)
    for place, run in enumerate(plan.runs):
        assert set(run.needs) <= set(folders[:place])
        assert len(os.path.basename(run.folder)) < 220
        if run.kind not in ("data", "tokenizer"):
            # The name of a recipe promises (16xb128) what its entries say.
            trains = run.command[0] == "tools/train.py"
            assert run.processes == (int(re.search(r"_(\d+)xb\d+", run.config)[1]) if trains else 1)


def test_a_recipe_that_does_not_say_how_long_has_no_last_checkpoint():
    assert final_checkpoint(Config(dict(train_cfg=dict(max_iters=7)))) == "iter_7.pth"
    with pytest.raises(DeclarationError, match="no length in `train_cfg`"):
        final_checkpoint(Config(dict(train_cfg=None)))


def test_a_row_goes_on_from_the_pretraining_of_another_and_shares_it(tmp_path):
    pretrain = f"pretrain={PRETRAIN!r}"
    rows = f"dict(name='a', {pretrain}), dict(name='c', {pretrain}, start='a'), dict(name='e', {pretrain}, "
    rows += "start='c', options={'train_cfg.max_epochs': 3})"
    declare_mine(tmp_path, rows=rows)
    runs = {run.name: run for run in plan_table(load_table("mine", "digits", tmp_path), [7], "out").runs}
    stem = "mapet_vit-micro_kclip_1xb32-coslr"
    first, second, third = (
        runs[f"{stem}{more}_seed-7"] for more in ("", "_going-on", "_max_epochs-3_going-on")
    )
    assert (second.needs, third.needs) == ((first.folder,), (second.folder,))
    assert f"model.backbone.init_cfg.checkpoint={second.outputs[0]}" in third.command
    assert len([run for run in runs.values() if run.kind == "pre-training"]) == 3
    declare_mine(tmp_path, rows=rows.replace("micro/mapet_vit", "micro/beit_vit"))
    with pytest.raises(DeclarationError, match=r"'c': .* has a list in `model\.backbone\.init_cfg`"):
        plan_table(load_table("mine", "digits", tmp_path), [0], "out")


def test_an_online_recipe_needs_the_codebook_and_no_store():
    table = load_table("objectives", "imagenet")
    online = "configs/mapet/mapet_vit-base-p16_kclip-online_64xb32-amp-coslr-300e_in1k.py"
    row = dataclasses.replace(table.rows[-1], pretrain=online)
    table = dataclasses.replace(table, rows=[row], columns=table.columns[-1:])
    assert [run.name.split("_")[0] for run in plan_table(table, [0], "out").runs][:2] == ["fit", "mapet"]


def test_an_evaluation_starts_where_its_config_leaves_a_checkpoint_open(tmp_path):
    """Any part of the model, in a list of `init_cfg` as well."""
    (tmp_path / "probe.py").write_text(
        "train_cfg = dict(max_iters=5)\nmodel = dict(body=dict(init_cfg=[dict(type='Constant'),"
        "dict(type='PretrainedInit', checkpoint=None)]), teacher=dict(init_cfg=dict(checkpoint='a.pth')))\n"
    )
    column = f"config={str(tmp_path / 'probe.py')!r}, metric='m'"
    declare_mine(tmp_path, row=f"name='a', pretrain={PRETRAIN!r}", column=column)
    pretraining, evaluation = plan_table(load_table("mine", "digits", tmp_path), [0], "out").runs
    assert f"model.body.init_cfg.1.checkpoint={pretraining.outputs[0]}" in evaluation.command
    assert evaluation.outputs == (f"{evaluation.folder}/iter_5.pth",)


def test_frozen_columns_are_one_evaluation_of_the_pretrained_weights():
    plan = plan_table(load_table("objectives", "digits"), [0], "out")
    cells = [cell for cell in plan.cells if cell.row == "MIM" and "vit-micro_frozen" in cell.run.name]
    assert [cell.metric for cell in cells] == [
        "k-NN, both",
        "logistic regression, both, 10 a class",
        "attentive probe, patch tokens, last layer",
        "k-NN segmentation, patch tokens",
    ]
    (run,) = {cell.run for cell in cells}
    (before,) = run.needs
    assert run.command == (
        *("tools/evaluate_features.py", "configs/evaluation/vit-micro_frozen.py", "--out", run.folder),
        *("--cache", f"{run.folder}/features", "--cfg-options"),
        *(f"model.init_cfg.checkpoint={before}/epoch_16.pth", "randomness.seed=0"),
        f"evaluation.version={VERSION}",
    )
    assert run.outputs == (f"{run.folder}/results.json",)
    (alone,) = {cell.run for cell in plan.cells if cell.row == "tokens alone"}
    assert [one.name for one in plan.closure([alone])] == [
        *("data", "fit_codebook_kclip", "extract_tokens_kclip", "tokens-micro_frozen--scratch_seed-0")
    ]


def steps(plan: Plan, row: str) -> list[tuple[str, str | None]]:
    """The runs of a row's first column, in order: the config, or the tool, and the dataset."""
    cell = next(cell for cell in plan.cells if cell.row == row)
    return [
        (os.path.basename(run.config or run.command[0]).split("_")[0].removesuffix(".py"), run.data)
        for run in plan.closure([cell.run])
    ]


def test_a_round_of_bootstrapping_is_made_from_the_round_before(tmp_path):
    plan = plan_table(load_table("rounds", GARMENTS), [0], tmp_path)
    rounds = [f"{GARMENTS}_round{number}" for number in range(3)]
    tokens = [[("grid", data), ("grid", data), ("mapet", data)] for data in rounds]
    data, probe = [("fashion", None)], [("vit-micro", GARMENTS)]
    assert steps(plan, "round 0, 5 epochs") == data + tokens[0] + probe
    assert steps(plan, "round 2, 5 epochs") == data + tokens[0] + tokens[1] + tokens[2] + probe
    clip = [("clip", GARMENTS), ("kclip", GARMENTS), ("kclip", GARMENTS), ("mapet", GARMENTS)]
    assert steps(plan, "MaPeT") == data + clip + probe
    folders = {run.outputs[0] for run in plan.runs if run.name.endswith("_tokenizer")}
    assert folders == {
        f"work_dirs/{rounds[1]}/previous_round/epoch_5.pth",
        f"work_dirs/{rounds[2]}/previous_round/epoch_5.pth",
        f"work_dirs/{GARMENTS}/clip/epoch_2.pth",
    }


def test_each_seed_draws_its_own_tokenizer_if_the_name_of_its_dataset_has_the_seed(tmp_path):
    data = f"{GARMENTS}_tokens{{seed}}"
    row = f"pretrain={PRETRAIN!r}, tokenizer={KCLIP!r}, data={data!r}"
    declare_mine(tmp_path, rows=f"dict(name='a', {row}), dict(name='c', start='a', {row})")
    runs = plan_table(load_table("mine", "digits", tmp_path), [0, 2], "out").runs
    clips = [run for run in runs if run.name.startswith("clip_")]
    assert [run.data for run in clips] == [data.format(seed=0), data.format(seed=2)]
    trained = [run.data for run in runs if run.kind == "pre-training"]
    assert trained == [clip.data for clip in clips for _ in range(2)]
    assert read_config(clips[1].config, clips[1].data).randomness.seed == 12  # 0 is that of the sweep
    assert read_config(KCLIP, clips[1].data).codebook.seed == 12


def test_the_teacher_is_trained_before_its_pupil_and_its_minutes_count(tmp_path, monkeypatch):
    """A minute each: CLIP, VQ-KD and extraction; pixels need a codebook and extraction alone."""
    filler = TableFiller(load_table("tokenizer_choice", GARMENTS), [0], tmp_path)
    assert steps(filler.plan, "VQ-KD") == [
        *(("fashion", None), ("clip", GARMENTS), ("vqkd-training", GARMENTS), ("vqkd", GARMENTS)),
        ("token-mlp", GARMENTS),
    ]
    assert steps(filler.plan, "k-means of pixels")[-1] == ("token-mlp", f"{GARMENTS}_round0")
    assert not [run for run in filler.plan.runs if run.kind == "pre-training"]
    record = dict(metrics={"accuracy/top1": 50.0}, seconds=60.0)
    monkeypatch.setattr(fill, "record_of", lambda run: record)
    cells, column = filler.cells(), "training, codebook, extraction (minutes)"
    assert cells["VQ-KD", column].mean == 3
    assert cells["k-means of pixels", column].mean == 2
    assert cells["k-means of pixels", "MLP on the tokens (top-1, %)"].mean == 50


def test_a_column_on_other_data_has_them_made():
    plan = plan_table(load_table("transfer", GARMENTS), [0], "out")
    made = {run.folder: run.command[0] for run in plan.runs if run.kind == "data"}
    for row, before in (("no pre-training", []), ("MaPeT", [None])):
        run = next(cell.run for cell in plan.cells if cell.row == row)
        assert [made.get(need) for need in run.needs] == [*before, "tools/dataset_converters/digits.py"]
        assert run.data == "digits"
