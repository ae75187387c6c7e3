"""From tables to runs: every cell's recipe, what is shared, what is handed on, what trains a tokenizer."""

import dataclasses
import re
from pathlib import Path

import pytest
from lab.plan import Plan, changed_config, config_of, final_checkpoint, plan_table
from lab.runs import launch_words, nodes_of, typed
from lab.tables import DeclarationError, Row, Table, list_tables, load_table
from mmengine.config import Config

from mapet_mm.evaluation import VERSION

PRETRAIN = "configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py"
KCLIP = "configs/micro/kclip.py"
FASHION = "fashion_mnist_20000"


@pytest.mark.parametrize("name", list_tables())
def test_every_cell_resolves_to_existing_configs(name):
    table = load_table(name)
    plan = plan_table(table, [0])
    columns = [len(table.columns) if row.columns is None else len(row.columns) for row in table.run_rows]
    assert len(plan.cells) == sum(columns)
    keys = list(plan.runs)
    for place, run in enumerate(plan.runs.values()):
        assert set(run.needs) <= set(keys[:place])
        assert len(run.key) < 220
        if (run.kind == "evaluation" and run.config) or run.kind == "pre-training":
            # The name of a recipe promises (16xb128) what its entries say.
            trains = run.command[0] == "tools/train.py"
            assert run.processes == (int(re.search(r"_(\d+)xb\d+", run.config)[1]) if trains else 1)


def test_a_recipe_that_does_not_say_how_long_has_no_last_checkpoint():
    assert final_checkpoint(Config(dict(train_cfg=dict(max_iters=7)))) == "iter_7.pth"
    with pytest.raises(DeclarationError, match="no length in `train_cfg`"):
        final_checkpoint(Config(dict(train_cfg=None)))


def own_table(**entries) -> Table:
    """A table on digits with one column, a linear probe."""
    digits = load_table("digits/objectives")
    column = next(column for column in digits.columns if column.name.startswith("linear probe"))
    return dataclasses.replace(
        digits, columns=[dataclasses.replace(column, paper={})], baseline=None, **entries
    )


def test_a_row_without_tokens_needs_only_what_its_recipe_names():
    runs = plan_table(load_table("context_loss/choice"), [0]).runs.values()
    needs = {run.name.split("_vit-micro")[0]: run.needs for run in runs if run.kind == "pre-training"}
    (tower,) = needs["visible-regression"]
    assert tower.startswith("clip_1xb128-coslr_tokenizer-")
    (images,) = needs["mae"]
    assert images.startswith("data_fashion_mnist-")
    (tokens,) = needs["beit-context"]
    assert tokens.startswith("extract_tokens_kclip-")


def test_a_row_continues_the_pretraining_of_another_and_shares_it():
    first = Row("a", PRETRAIN)
    second = Row("c", PRETRAIN, start="a")
    third = Row("e", PRETRAIN, start="c", options={"train_cfg.max_epochs": 3})
    runs = {run.name: run for run in plan_table(own_table(rows=[first, second, third]), [7]).runs.values()}
    stem = "mapet_vit-micro_kclip_1xb32-coslr"
    names = (f"{stem}_seed-7", f"{stem}_continued_seed-7", f"{stem}_max_epochs-3_continued_seed-7")
    one, two, three = map(runs.get, names)
    assert (one.key in two.needs, two.key in three.needs) == (True, True)
    assert f"model.backbone.init_cfg.checkpoint={two.outputs[0]}" in three.command
    assert len([run for run in runs.values() if run.kind == "pre-training"]) == 3
    beit = dataclasses.replace(second, pretrain=PRETRAIN.replace("mapet_vit", "beit_vit"))
    with pytest.raises(DeclarationError, match=r"'c': .* has a list in `model\.backbone\.init_cfg`"):
        plan_table(own_table(rows=[first, beit]), [0])


def test_an_online_recipe_needs_the_codebook_and_no_store():
    table = load_table("imagenet/objectives")
    online = "configs/mapet/mapet_vit-base-p16_kclip-online_64xb32-amp-coslr-300e_in1k.py"
    row = dataclasses.replace(table.rows[-1], pretrain=online)
    table = dataclasses.replace(table, rows=[row], columns=table.columns[-1:])
    names = [run.name.split("_")[0] for run in plan_table(table, [0]).runs.values()]
    assert names[:2] == ["fit", "mapet"]


def test_frozen_columns_are_one_evaluation_of_the_pretrained_weights():
    plan = plan_table(load_table("digits/objectives"), [0])
    cells = [cell for cell in plan.cells if cell.row == "MIM" and "vit-micro_frozen" in cell.run]
    assert [cell.metric for cell in cells] == [
        "k-NN, both",
        "logistic regression, both, 10 a class",
        "attentive probe, patch tokens, last layer",
        "k-NN segmentation, patch tokens",
    ]
    (key,) = {cell.run for cell in cells}
    run = plan.runs[key]
    before = plan.runs[run.needs[0]]
    assert run.command == [
        *("tools/evaluate_features.py", "configs/evaluation/vit-micro_frozen.py"),
        *("--no-random", "--out", run.folder, "--cache", f"{run.folder}/features", "--cfg-options"),
        *(f"model.init_cfg.checkpoint={before.folder}/epoch_16.pth", "randomness.seed=0"),
        f"evaluation.version={VERSION}",
    ]
    assert run.outputs == [f"{run.folder}/results.json"]
    (alone,) = {cell.run for cell in plan.cells if cell.row == "tokens alone"}
    assert [one.name for one in plan.with_needs([alone])] == [
        *("data_digits_scenes", "fit_codebook_kclip", "extract_tokens_kclip"),
        "tokens-micro_frozen--scratch_seed-0",
    ]


def test_records_of_an_earlier_version_of_the_protocols_are_other_results():
    table = load_table("digits/objectives")
    frozen = {
        version: {run.id for run in plan_table(table, [0], version).runs.values() if run.evaluation}
        for version in (1, 2)
    }
    assert frozen[1].isdisjoint(frozen[2])
    trained = [
        {run.id for run in plan_table(table, [0], version).runs.values() if not run.evaluation}
        for version in (1, 2)
    ]
    assert trained[0] == trained[1]


def steps(plan: Plan, row: str) -> list[tuple[str, str | None]]:
    """The runs of a row's first column, in order: the config, or the tool, and the dataset."""
    cell = next(cell for cell in plan.cells if cell.row == row)
    return [
        (Path(run.config or run.command[0]).stem.split("_")[0], run.data)
        for run in plan.with_needs([cell.run])
    ]


def test_a_generation_of_bootstrapped_tokens_is_made_from_the_one_before():
    plan = plan_table(load_table("fashion_mnist/bootstrap"), [0])
    generations = [f"{FASHION}_bootstrap{number}" for number in range(3)]
    tokens = [[("grid", data), ("grid", data), ("mapet", data)] for data in generations]
    data, probe = [("fashion", None)], [("vit-micro", FASHION)]
    assert steps(plan, "generation 0, 5 epochs") == data + tokens[0] + probe
    assert steps(plan, "generation 2, 5 epochs") == data + tokens[0] + tokens[1] + tokens[2] + probe
    clip = [("clip", FASHION), ("kclip", FASHION), ("kclip", FASHION), ("mapet", FASHION)]
    assert steps(plan, "MaPeT") == data + clip + probe
    trained = {run.outputs[0] for run in plan.runs.values() if run.name.endswith("_tokenizer")}
    assert trained == {
        f"work_dirs/{generations[1]}/previous/epoch_5.pth",
        f"work_dirs/{generations[2]}/previous/epoch_5.pth",
        f"work_dirs/{FASHION}/clip/epoch_2.pth",
    }


def test_each_seed_draws_its_own_tokenizer_if_the_name_of_its_dataset_has_the_seed():
    data = f"{FASHION}_tokens{{seed}}"
    rows = [Row("a", PRETRAIN, KCLIP, data=data), Row("c", PRETRAIN, KCLIP, data=data, start="a")]
    table = dataclasses.replace(
        own_table(rows=rows), dataset=FASHION, data=load_table("fashion_mnist/objectives").data
    )
    runs = plan_table(table, [0, 2]).runs.values()
    clips = [run for run in runs if run.name.startswith("clip_")]
    assert [run.data for run in clips] == [data.format(seed=0), data.format(seed=2)]
    assert [run.data for run in runs if run.kind == "pre-training"] == [
        clip.data for clip in clips for _ in range(2)
    ]
    assert config_of(clips[1].config, clips[1].data).randomness.seed == 12  # 0 is that of the sweep
    assert config_of(KCLIP, clips[1].data).codebook.seed == 12


def test_the_teacher_is_trained_before_its_pupil():
    plan = plan_table(load_table("fashion_mnist/tokenizers"), [0])
    assert steps(plan, "VQ-KD")[:-1] == [
        *(("fashion", None), ("clip", FASHION), ("vqkd-training", FASHION), ("vqkd", FASHION))
    ]
    cells = [cell for cell in plan.cells if cell.row == "k-means of pixels"]
    assert {plan.runs[cell.run].data for cell in cells} == {f"{FASHION}_bootstrap0"}
    assert not [run for run in plan.runs.values() if run.kind == "pre-training"]


def test_a_column_on_other_data_has_them_made():
    plan = plan_table(load_table("fashion_mnist/transfer"), [0])
    for row, before in (
        ("no pre-training", set()),
        ("MaPeT", {"mapet_vit-micro_kclip_1xb32-amp-coslr_lr-0.048_seed-0"}),
    ):
        key = next(cell.run for cell in plan.cells if cell.row == row)
        needs = {plan.runs[need].name for need in plan.runs[key].needs}
        assert needs == {*before, "data_digits"}
        assert plan.runs[key].data == "digits"


def imagenet_runs() -> dict:
    """Runs of one cell, a linear probe of MIM with k-CLIP, by their kind of step."""
    plan = plan_table(load_table("imagenet/objectives"), [0])
    cell = next(
        c for c in plan.cells if (c.row, c.column) == ("MIM, k-CLIP", "ViT-T, linear probe (top-1, %)")
    )
    return dict(zip(("codebook", "tokens", "pretraining", "probe"), plan.with_needs([cell.run]), strict=True))


def test_a_recipe_starts_in_as_many_processes_as_it_is_meant_for():
    runs = imagenet_runs()
    run = runs["pretraining"]
    config = "configs/mim/mim_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k.py"
    rest = ["--work-dir", run.folder, "--resume", "--cfg-options", "randomness.seed=0"]
    assert nodes_of(run, 8) == 2
    assert launch_words(run, 2, "python") == [
        *("srun", "--nodes=2", "--ntasks=16", "--kill-on-bad-exit=1", "python", "-u", "tools/train.py"),
        *(config, *rest, "--launcher", "slurm"),
    ]
    assert launch_words(run, 1, "python") == ["bash", "tools/dist_train.sh", config, "16", *rest]
    assert launch_words(runs["tokens"], 1, "python") == [
        *("python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=8"),
        *("tools/extract_tokens.py", "configs/tokenizers/kclip_rn50x64-448px_k8192_in1k.py"),
    ]


def test_a_command_is_printed_with_its_dataset_and_reads_it():
    plan = plan_table(load_table("fashion_mnist/objectives"), [1])
    lines = [typed(run, 0, 1) for run in plan.runs.values()]
    folder = "../../../../research/configs/data"
    where = f"PYTHONPATH=research MAPET_MM_DATA={folder}/fashion_mnist_20000_tokens_of_seed MAPET_MM_SEED=1"
    assert f"OMP_NUM_THREADS=1 {where} python tools/fit_codebook.py configs/micro/kclip.py" in lines
    (clip,) = [line for line in lines if "research/configs/clip_" in line and "MAPET_MM_SEED=1" in line]
    assert where in clip
    for run in plan.runs.values():
        if run.config:
            cfg = changed_config(run.config, run.data, run.options)
            assert "data/fashion_mnist" in str(cfg.to_dict())
