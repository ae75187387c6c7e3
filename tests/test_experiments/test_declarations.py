"""The declared tables: every config exists, the paper's numbers are the paper's, wrong ones are refused."""

import dataclasses
import os
import re

import pytest
from config_building import ROOT
from mmengine.config import Config

from mapet_mm.experiments.plan import plan_table
from mapet_mm.experiments.recipes import final_checkpoint
from mapet_mm.experiments.table import DeclarationError, list_datasets, list_tables, load_table

TABLES = [
    (dataset, name)
    for dataset in list_datasets(ROOT / "configs/tables")
    for name in list_tables(dataset, ROOT / "configs/tables")
]
NAMES = ["comparison", "cutting_point", "objectives", "segmentation", "tokenizers", "transfer"]

# Column by column, rows in the paper's order; None where the paper has a dash.
PAPER = {
    "objectives": [
        [74.6, 74.9, 74.5, 74.9, 75.3, 75.5],
        [55.3, 56.4, 59.6, 60.4, 59.7, 62.5],
        [82.0, 82.1, 82.2, 82.0, 81.8, 82.1],
        [69.9, 68.7, 69.8, 71.1, 69.5, 71.6],
        [83.8, 83.7, 84.4, 83.3, 83.3, 83.6],
        [72.3, 73.3, 73.8, 72.3, 73.5, 73.5],
    ],
    "comparison": [
        [73.7, 73.4, 75.0, 74.5, 73.7, 74.8, 75.5],
        [None, 52.4, 62.0, 59.6, 53.9, 61.5, 62.5],
        [79.8, 81.6, 82.2, 82.2, 81.5, 81.9, 82.1],
        [None, 63.4, 72.6, 69.8, 62.9, 71.1, 71.6],
        [81.8, 83.5, 84.4, 84.4, 82.7, 83.3, 83.6],
        [None, 69.4, 75.0, 73.8, 67.6, 73.3, 73.5],
    ],
    "segmentation": [
        [39.0, 40.2, 39.3, 39.2, 39.9],
        [45.6, 46.1, 47.0, 45.9, 46.7],
        [49.3, 49.0, 50.4, 50.2, 50.3],
    ],
    "transfer": [[53.6, 64.5, 68.5], [81.4, 86.9, 86.9], [40.5, 44.9, 46.8]],
    "cutting_point": [[84.2, 84.3, 84.3, 84.4, 84.1]],
    "sota": [
        [81.7, 82.0, None, None, None, None, None, 82.1, 82.2, None, None, None, None],
        [82.9, 83.6, 83.6, 83.6, 84.1, 84.4, 85.0, 83.6, 84.4, 83.2, 83.8, 83.9, 85.5],
    ],
    "tokenizers": [[4.1, 68.1, 72.8], [11.7, 89.8, 93.2], [9.1, 72.3, 76.2], [21.9, 92.2, 94.9]],
}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    """Tables name configs from the repository's root, where the tools run."""
    monkeypatch.chdir(ROOT)


def test_every_table_of_the_paper_is_declared_for_both_data_sets():
    """But for the numbers of the literature, which no digits run stands beside; digits have one more."""
    assert list_tables("digits") == sorted([*NAMES, "downstream"])
    assert list_tables("imagenet") == sorted([*NAMES, "sota"])


@pytest.mark.parametrize(("dataset", "name"), TABLES)
def test_every_cell_resolves_to_existing_configs(name, dataset):
    table = load_table(name, dataset)
    plan = plan_table(table, [0, 1], "out")
    evaluated = [len(table.columns) if row.columns is None else len(row.columns) for row in table.rows]
    assert len(plan.cells) == 2 * sum(evaluated)
    folders = [run.folder for run in plan.runs]
    assert len(set(folders)) == len(folders)
    for i, run in enumerate(plan.runs):
        assert set(run.needs) <= set(folders[:i])
        assert len(os.path.basename(run.folder)) < 220
        assert run.processes == processes_in_the_name(run)
        if run.config:
            assert os.path.isfile(run.config)


def processes_in_the_name(run) -> int:
    """What the name of a recipe promises (16xb128) is what its entries say."""
    if run.kind in ("data", "tokenizer"):
        return run.processes
    if run.command[0] == "tools/evaluate_features.py":
        return 1
    return int(re.search(r"_(\d+)xb\d+", run.config)[1])


@pytest.mark.parametrize("name", [*NAMES, "sota"])
def test_the_papers_numbers_are_the_papers(name):
    table = load_table(name, "imagenet")
    declared = [[column.paper.get(row.name) for row in table.rows] for column in table.columns]
    assert declared == PAPER[name]


def test_digits_numbers_beside_ours_are_those_of_the_papers_smallest_model():
    table = load_table("objectives", "digits")
    paper = {column.name: column.paper for column in table.columns}
    vit_tiny = dict(
        zip(
            [row.name for row in load_table("comparison", "imagenet").rows],
            PAPER["comparison"][0],
            strict=True,
        )
    )
    for ours, theirs in (("CAE", "CAE, k-CLIP"), ("BEiT", "BEiT, k-CLIP"), ("MaPeT", "MaPeT, k-CLIP")):
        assert paper["fine-tuning, all labels"][ours] == vit_tiny[theirs]
    assert paper["k-NN"] == {}


def test_tables_share_what_they_have_in_common():
    """MaPeT's pre-training and evaluations are the same runs in both tables; top-1 and top-5 are one run."""
    one, two = (plan_table(load_table(name, "imagenet"), [0], "out") for name in ("objectives", "comparison"))
    shared = {run.name for run in one.runs} & {run.name for run in two.runs}
    trainings = [name for name in shared if name.startswith("mapet_")]
    evaluations = [name for name in shared if "--mapet_" in name]
    assert (len(trainings), len(evaluations)) == (6, 12)
    study = plan_table(load_table("tokenizers", "imagenet"), [0], "out")
    assert (len(study.cells), len({cell.run.folder for cell in study.cells})) == (12, 6)


def test_no_pretraining_is_trained_as_deit_and_not_probed():
    """73.7, 79.8 and 81.8 beside a recipe of its own; the paper has no linear probe in that row."""
    plan = plan_table(load_table("comparison", "imagenet"), [0], "out")
    cells = [cell for cell in plan.cells if cell.row == "ViT, no pre-training"]
    assert [cell.column for cell in cells] == [f"ViT-{size}, fine-tuning (top-1, %)" for size in "TSB"]
    assert [cell.run.config for cell in cells] == [
        f"configs/scratch/vit-{name}-scratch-amp-coslr-300e_in1k.py"
        for name in ("tiny-p16_4xb256", "small-p16_4xb256", "base-p16_16xb64")
    ]


def test_no_pretraining_on_digits_has_its_own_recipe_where_everything_is_trained():
    cells = plan_table(load_table("objectives", "digits"), [0], "out").cells
    names = ("no pre-training", "MaPeT")
    scratch, mapet = ([cell.run.config for cell in cells if cell.row == name] for name in names)
    assert [a == b for a, b in zip(scratch, mapet, strict=True)] == [True] * 5 + [False, True]
    assert scratch[5] == "configs/micro/vit-micro_1xb64-scratch-coslr.py"


def test_numbers_of_the_literature_are_marked_and_not_run():
    table = load_table("sota", "imagenet")
    plan = plan_table(table, [0], "out")
    assert {cell.row for cell in plan.cells} == {"MaPeT, k-CLIP", "MaPeT, VQ-KD"}
    assert len(plan.cells) == 4
    others = [row for row in table.rows if row.columns is not None]
    assert len(others) == 11
    assert all("(literature)" in row.name and not row.columns and row.pretrain is None for row in others)


def test_the_objectives_table_on_digits_is_the_one_that_is_asked_for():
    """Six rows of four evaluations, the tokens alone of one, three seeds; a pre-training per seed."""
    plan = plan_table(load_table("objectives", "digits"), range(3), "out")
    kinds = [run.kind for run in plan.runs]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "data": 1,
        "tokenizer": 2,
        "pre-training": 15,
        "evaluation": 75,
    }


def test_overrides_are_part_of_a_runs_name_and_command():
    plan = plan_table(load_table("cutting_point", "imagenet"), [3], "out")
    stems = [run.name for run in plan.runs if run.kind == "pre-training"]
    stem = "mapet_vit-base-p16_vqkd_64xb32-amp-coslr-300e_in1k"
    assert stems == [
        *(f"{stem}_cutting_point-{c}_seed-3" for c in (30, 40, 50)),
        f"{stem}_seed-3",
        f"{stem}_cutting_point-98_seed-3",
    ]
    run = next(run for run in plan.runs if run.name == stems[0])
    assert run.command[-3:] == ("--cfg-options", "model.backbone.cutting_point=30", "randomness.seed=3")


def write(tmp_path, text: str) -> None:
    (tmp_path / "digits").mkdir(exist_ok=True)
    (tmp_path / "digits.py").touch()
    (tmp_path / "digits" / "mine.py").write_text(text)


GOOD = (
    "title = 'x'\nrows = [dict(name='a')]\n"
    "columns = [dict(name='b', unit='%', config='configs/micro/kclip.py', metric='m')]\n"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows = []\ncolumns = []\n", "has no `title`"),
        (GOOD.replace("dict(name='a')", "dict(name='a'), dict(name='a')"), "two rows named 'a'"),
        (GOOD.replace("metric='m'", "metric='m', paper={'c': 1.0}"), "name 'c', which is no row; rows are a"),
        (GOOD.replace("name='a'", "name='a', pretrian=3"), "`pretrian` of 'a' has to be a string"),
        (
            GOOD.replace("name='a'", "name='a', columns=['z']"),
            "row 'a' names 'z', which is no column; columns are b",
        ),
        (
            GOOD.replace("dict(name='a')", "dict(name='a'), dict(name='c', pretrain='p', start='a')"),
            "`start` of row 'c' names 'a', which is no pre-trained row above it",
        ),
        (GOOD.replace("metric='m'", ""), "missing 1 required positional argument: 'metric'"),
    ],
)
def test_a_wrong_declaration_says_what_and_where(text, message, tmp_path):
    write(tmp_path, text)
    with pytest.raises(DeclarationError, match=message):
        load_table("mine", "digits", tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("configs/nothing.py", r"`configs/nothing.py`, which does not exist"),
        ("configs/{size}.py", r"nothing stands for \{size\} of `configs/\{size\}.py`"),
    ],
)
def test_a_config_that_is_not_there_is_named(config, message, tmp_path):
    write(tmp_path, GOOD.replace("configs/micro/kclip.py", config))
    with pytest.raises(DeclarationError, match=message):
        plan_table(load_table("mine", "digits", tmp_path), [0], "out")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("runner = dict(launcher='moon')", "launcher 'moon' is none of local, dist, slurm"),
        ("runner = dict(gpus=8)", "unexpected keyword argument 'gpus'"),
    ],
)
def test_a_wrong_runner_is_refused(entry, message, tmp_path):
    write(tmp_path, GOOD + entry)
    with pytest.raises(DeclarationError, match=message):
        load_table("mine", "digits", tmp_path)


def test_a_pretraining_is_handed_on_in_one_place_alone(tmp_path):
    pretrain = "configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py"
    row = f"dict(name='a', pretrain='{pretrain}')"
    write(tmp_path, GOOD.replace("dict(name='a')", row).replace("configs/micro/kclip.py", pretrain))
    with pytest.raises(DeclarationError, match=r"leaves 0 `checkpoint` of its model open"):
        plan_table(load_table("mine", "digits", tmp_path), [0], "out")


def test_a_recipe_that_does_not_say_how_long_has_no_last_checkpoint():
    assert final_checkpoint(Config(dict(train_cfg=dict(max_iters=7)))) == "iter_7.pth"
    with pytest.raises(DeclarationError, match="has no `train_cfg` that says how long: it cannot be trained"):
        final_checkpoint(Config(dict(train_cfg=None)))


def test_a_pretraining_that_does_not_read_the_rows_tokens_is_refused(tmp_path):
    pretrain = "configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py"
    row = f"dict(name='a', pretrain='{pretrain}', tokenizer='configs/micro/dalle.py')"
    probe = "configs/micro/vit-micro_1xb128-linear-coslr.py"
    write(tmp_path, GOOD.replace("dict(name='a')", row).replace("configs/micro/kclip.py", probe))
    with pytest.raises(DeclarationError, match=r"'a': `.*mapet.*` reads no tokens of `.*dalle\.py`"):
        plan_table(load_table("mine", "digits", tmp_path), [0], "out")


def test_a_row_goes_on_from_the_pretraining_of_another_and_shares_it(tmp_path):
    pretrain = "pretrain='configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py'"
    rows = f"dict(name='a', {pretrain}), dict(name='c', {pretrain}, start='a'), dict(name='e', {pretrain}, "
    rows += "start='c', options={'train_cfg.max_epochs': 3})"
    probe = "configs/micro/vit-micro_1xb128-linear-coslr.py"
    text = GOOD.replace("dict(name='a')", rows).replace("configs/micro/kclip.py", probe)
    write(tmp_path, text)
    runs = {run.name: run for run in plan_table(load_table("mine", "digits", tmp_path), [7], "out").runs}
    stem = "mapet_vit-micro_kclip_1xb32-coslr"
    first, second, third = (
        runs[f"{stem}{more}_seed-7"] for more in ("", "_going-on", "_max_epochs-3_going-on")
    )
    assert (second.needs, third.needs) == ((first.folder,), (second.folder,))
    assert f"model.backbone.init_cfg.checkpoint={second.outputs[0]}" in third.command
    assert len([run for run in runs.values() if run.kind == "pre-training"]) == 3
    beit = text.replace("micro/mapet_vit", "micro/beit_vit")
    write(tmp_path, beit)
    with pytest.raises(DeclarationError, match=r"'c': .* has a list in `model\.backbone\.init_cfg`"):
        plan_table(load_table("mine", "digits", tmp_path), [0], "out")


def test_an_online_recipe_needs_the_codebook_and_no_store():
    table = load_table("objectives", "imagenet")
    online = "configs/mapet/mapet_vit-base-p16_kclip-online_64xb32-amp-coslr-300e_in1k.py"
    row = dataclasses.replace(table.rows[-1], pretrain=online)
    table = dataclasses.replace(table, rows=[row], columns=table.columns[-1:])
    assert [run.name.split("_")[0] for run in plan_table(table, [0], "out").runs][:2] == ["fit", "mapet"]


def test_where_an_evaluation_starts_is_said_by_its_config(tmp_path):
    """Whatever part of the model waits for a checkpoint gets it, in a list of `init_cfg` as well."""
    (tmp_path / "probe.py").write_text(
        "train_cfg = dict(max_iters=5)\nmodel = dict(body=dict(init_cfg=[dict(type='Constant'),"
        "dict(type='PretrainedInit', checkpoint=None)]), teacher=dict(init_cfg=dict(checkpoint='a.pth')))\n"
    )
    pretrain = "configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py"
    text = GOOD.replace("dict(name='a')", f"dict(name='a', pretrain='{pretrain}')")
    write(tmp_path, text.replace("configs/micro/kclip.py", str(tmp_path / "probe.py")))
    pretraining, evaluation = plan_table(load_table("mine", "digits", tmp_path), [0], "out").runs
    assert f"model.body.init_cfg.1.checkpoint={pretraining.outputs[0]}" in evaluation.command
    assert evaluation.outputs == (f"{evaluation.folder}/iter_5.pth",)


def test_unknown_tables_and_rows_are_answered_with_those_that_are_there():
    with pytest.raises(
        DeclarationError, match="no table `sota` for digits; there are: comparison, cutting_point"
    ):
        load_table("sota", "digits")
    with pytest.raises(DeclarationError, match=r"there is no mnist\.py in .*; there are: digits, .*imagenet"):
        load_table("objectives", "mnist")
    with pytest.raises(
        DeclarationError,
        match="names 'DINO', which is no row; rows are tokens alone, no pre-training, MIM, PIM",
    ):
        load_table("objectives", "digits").require(["MIM", "DINO"], [])
    with pytest.raises(DeclarationError, match="--columns names 'knn', which is no column; columns"):
        load_table("objectives", "digits").require([], ["k-NN", "knn"])


def test_frozen_columns_are_one_evaluation_of_the_pretrained_weights():
    table = load_table("objectives", "digits")
    plan = plan_table(table, [0], "out")
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
    )
    assert run.outputs == (f"{run.folder}/results.json",)


def test_the_tokens_alone_are_judged_by_the_tokens_that_pretraining_predicts():
    plan = plan_table(load_table("objectives", "digits"), [0], "out")
    cells = [cell for cell in plan.cells if cell.row == "tokens alone"]
    assert [cell.metric for cell in cells] == [
        "k-NN, class token",
        "logistic regression, class token, 10 a class",
    ]
    assert cells[0].run == cells[1].run
    assert [plan_run.name for plan_run in plan.closure([cells[0].run])] == [
        *("data", "fit_codebook_kclip", "extract_tokens_kclip", "tokens-micro_frozen--scratch_seed-0")
    ]
