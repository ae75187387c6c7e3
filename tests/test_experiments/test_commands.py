"""The command lines for a cluster, to the letter, and the paper's GPU-hours."""

import runpy
import sys

import pytest
from config_building import ROOT

from mapet_mm.experiments.commands import command_line, gpus_of, hours_report
from mapet_mm.experiments.declaration import load_table
from mapet_mm.experiments.plan import plan_table

PRETRAIN = "configs/mim/mim_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k.py"
PROBE = "configs/mapet/benchmarks/vit-tiny-p16_8xb128-linear-amp-coslr-50e_in1k.py"
RUNS = "out/runs"
MIM = "mim_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k_seed-0"
MIM_PROBE = f"vit-tiny-p16_8xb128-linear-amp-coslr-50e_in1k--{MIM}"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def runs() -> dict:
    plan = plan_table(load_table("objectives", "imagenet").only(["MIM, k-CLIP"]), [0], "out")
    return {run.name: run for run in plan.runs}


def test_lines_of_dist_train(runs):
    assert command_line(runs[MIM], "dist") == (
        f"bash tools/dist_train.sh {PRETRAIN} 16 --work-dir {RUNS}/{MIM} --resume "
        "--cfg-options randomness.seed=0"
    )
    assert command_line(runs[MIM_PROBE], "dist") == (
        f"bash tools/dist_train.sh {PROBE} 8 --work-dir {RUNS}/{MIM_PROBE} --resume --cfg-options "
        f"model.backbone.init_cfg.checkpoint={RUNS}/{MIM}/epoch_300.pth randomness.seed=0"
    )


def test_lines_of_slurm_train(runs):
    assert command_line(runs[MIM], "slurm", "gpu") == (
        f"GPUS=16 bash tools/slurm_train.sh gpu mim {PRETRAIN} {RUNS}/{MIM} --resume "
        "--cfg-options randomness.seed=0"
    )


def test_the_tokenizers_commands_come_first(runs):
    tokenizer = "configs/tokenizers/kclip_rn50x64-448px_k8192_in1k.py"
    lines = [command_line(run, "dist") for run in runs.values()]
    assert lines[:2] == [
        f"python tools/fit_codebook.py {tokenizer} --overwrite",
        f"python tools/extract_tokens.py {tokenizer}",
    ]


def test_no_pretraining_starts_from_random_weights():
    plan = plan_table(load_table("comparison", "imagenet").only(["ViT, no pre-training"]), [0], "out")
    line = command_line(plan.runs[0], "dist")
    assert line.endswith("--cfg-options model.backbone.init_cfg=None randomness.seed=0")
    assert all(run.kind == "evaluation" for run in plan.runs)


def test_hours_are_the_papers_or_not_given():
    table = load_table("cutting_point", "imagenet").only(["c = 60", "c = 30"])
    runs = plan_table(table, [0], "out").runs
    assert hours_report(runs, table.gpu_hours)[-1] == "in all 3456 GPU-hours (paper, V100)"
    table = load_table("objectives", "imagenet").only(["MIM, k-CLIP"])
    lines = hours_report(plan_table(table, [0], "out").runs, table.gpu_hours)
    assert "1 x mim_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k: the paper gives no time" in lines
    assert lines[-1].endswith("and 6 trainings that the paper gives no time for")


def test_gpus_are_those_of_the_name():
    assert (gpus_of(PRETRAIN), gpus_of(PROBE)) == (16, 8)


def run_tool(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run_table.py", *arguments])
    runpy.run_path(str(ROOT / "tools/run_table.py"), run_name="__main__")


def test_dry_run_prints_and_runs_nothing(monkeypatch, capsys, tmp_path):
    run_tool(monkeypatch, "transfer", "--dataset", "imagenet", "--dry-run", "--out", str(tmp_path / "out"))
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("bash tools/dist_train.sh")).split()[2:4] == [
        "configs/cae/cae_vit-base-p16_vqkd_64xb32-amp-coslr-300e_in1k.py",
        "64",
    ]
    assert "13 runs: 1 tokenizer, 3 pre-training, 9 evaluation" in lines
    assert not (tmp_path / "out").exists()


def test_imagenet_without_its_folder_is_one_line(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match=r"error: folder data/imagenet is not there"):
        run_tool(monkeypatch, "objectives", "--dataset", "imagenet", "--out", str(tmp_path))
