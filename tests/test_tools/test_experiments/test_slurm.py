"""Jobs, their dependencies and scripts, and the lines for several machines, to the letter."""

import os
import sys
from pathlib import Path

import pytest
from config_building import ROOT, run_tool
from experiments.declaration import load_table
from experiments.local import launch_words
from experiments.plan import plan_table
from experiments.records import StageError
from experiments.slurm import live_jobs, sbatch_words, submit
from fake_project import filler

PRETRAIN = "configs/mim/mim_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k.py"
TOKENIZER = "configs/tokenizers/kclip_rn50x64-448px_k8192_in1k.py"
PYTHON = sys.executable


@pytest.fixture(scope="module")
def planned() -> tuple[dict, dict]:
    """Runs of one cell, a linear probe of MIM with k-CLIP, and the runner of their table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        table = load_table("objectives", "imagenet")
        plan = plan_table(table, [0], "out")
    place = ("MIM, k-CLIP", "ViT-T, linear probe (top-1, %)")
    cell = next(cell for cell in plan.cells if (cell.row, cell.column) == place)
    steps = ("codebook", "tokens", "pretraining", "probe")
    return dict(zip(steps, plan.closure([cell.run]), strict=True)), table.runner


def test_a_job_asks_for_what_its_recipe_needs_and_waits_for_what_it_needs(planned):
    runs, runner = planned
    run = runs["pretraining"]
    assert sbatch_words(run, runner, ["7", "8"]) == [
        *("sbatch", "--parsable", f"--job-name={run.name}", f"--output={run.folder}/job.log"),
        *("--open-mode=append", "--requeue", "--nodes=2", "--signal=B:USR1@120", "--ntasks-per-node=8"),
        *("--cpus-per-task=5", "--gres=gpu:8", "--dependency=afterok:7:8", "--kill-on-invalid-dep=yes"),
    ]
    assert launch_words(run, "slurm", 5) == [
        *("srun", "--kill-on-bad-exit=1", "--cpus-per-task=5", PYTHON, "-u", "tools/train.py", PRETRAIN),
        *("--work-dir", run.folder, "--resume", "--cfg-options", "randomness.seed=0", "--launcher", "slurm"),
    ]


def test_tokenizers_run_on_the_gpus_of_one_machine_through_torchrun(planned):
    runs, runner = planned
    assert launch_words(runs["tokens"], "slurm", 5) == [
        *(PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=8"),
        *("tools/extract_tokens.py", TOKENIZER),
    ]
    words = {"--nodes=1", "--ntasks-per-node=8", "--gres=gpu:8"}
    assert words <= set(sbatch_words(runs["codebook"], runner))


def test_runs_on_the_cpu_ask_for_no_gpu(repository):
    table = load_table("objectives", "digits")
    run = plan_table(table, [0], "out").runs[-1]
    words = sbatch_words(run, table.runner)
    assert {"--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=1"} <= set(words)
    assert not any(word.startswith(("--gres", "--dependency")) for word in words)
    assert launch_words(run, "slurm", 1) == [PYTHON, *run.command]


def test_dry_run_prints_and_runs_nothing(repository, monkeypatch, capsys, tmp_path):
    out = tmp_path / "out"
    run_tool(monkeypatch, "run_table.py", "transfer", "--dataset", "imagenet", "--dry-run", "--out", out)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("bash tools/dist_train.sh configs/mapet/mapet_vit-base") for line in lines)
    assert "13 runs: 1 tokenizer, 3 pre-training, 9 evaluation" in lines
    assert not out.exists()


def test_imagenet_without_its_folder_is_one_line(repository, monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match=r"error: folder data/imagenet is missing"):
        run_tool(monkeypatch, "run_table.py", "objectives", "--dataset", "imagenet", "--out", str(tmp_path))


# Stands for Slurm: sbatch counts jobs and keeps what it got, squeue lists those in queue.txt.
SBATCH = """#!/bin/bash
number=$(($(ls jobs | wc -l) + 100))
{ echo "$@"; cat; } > jobs/$number
echo "$number PENDING" >> queue.txt
echo "$number;cluster"
"""


@pytest.fixture
def project(project, monkeypatch) -> Path:
    (project / "jobs").mkdir()
    (project / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", "#!/bin/bash\ncat queue.txt\n")):
        (project / "bin" / name).write_text(text)
        (project / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{project / 'bin'}:{os.environ['PATH']}")
    return project


def submitted() -> dict[str, str]:
    return {path.name: path.read_text().splitlines()[0] for path in sorted(Path("jobs").iterdir())}


def test_a_training_for_more_gpus_than_there_are_is_refused_before_anything_starts(project, monkeypatch):
    text = (project / "configs/one.py").read_text()
    more = "train_dataloader = dict(batch_size=2)\nauto_scale_lr = dict(base_batch_size=128)\n"
    (project / "configs/one.py").write_text(text + more)
    with pytest.raises(SystemExit, match=r"one_seed-0 is meant for 64 GPUs, here are \d: --launcher slurm"):
        run_tool(monkeypatch, "run_table.py", "small", "--launcher", "dist", "--out", "out")
    assert not Path("starts.txt").exists()


def test_a_plan_is_submitted_once_with_its_dependencies(project):
    """A second person who starts the same table submits nothing; a cancelled job's run is submitted again."""
    one = filler()
    runs, runner = one.needed_runs(["one"]), one.table.runner
    assert submit(runs, runner) == 4
    jobs = submitted()
    assert ["--dependency" in line for line in jobs.values()] == [False, True, True, True]
    assert "--dependency=afterok:100 " in jobs["101"]
    assert all("--dependency=afterok:101 " in jobs[number] for number in ("102", "103"))
    assert submit(filler().needed_runs(["one"]), runner) == 0
    assert filler().states()[runs[0].folder] == "pending"
    queue = Path("queue.txt").read_text().splitlines()
    Path("queue.txt").write_text("100 RUNNING\n" + "\n".join(line for line in queue if line[:3] == "101"))
    assert {state for _, state in live_jobs(runs).values()} == {"RUNNING", "PENDING"}
    assert submit(runs, runner) == 2
    assert "--dependency=afterok:101 " in submitted()["104"]


def test_the_script_of_a_job_does_its_run(project, monkeypatch, capsys):
    slurm = ["--launcher", "slurm", "--sbatch=--partition=cpu"]
    run_tool(monkeypatch, "run_table.py", "small", "--rows", "scratch", *slurm, "--out", "out")
    assert all("--partition=cpu" in line for line in submitted().values())
    for number in ("100", "101"):
        lines = Path("jobs", number).read_text().splitlines()
        assert os.system("\n".join(lines[1:])) == 0
    Path("queue.txt").write_text("")
    capsys.readouterr()
    run_tool(monkeypatch, "run_table.py", "small", "--out", "out", "--collect")
    assert "1 of 6 results are there; runs: 2 done, 7 not run" in capsys.readouterr().out


def test_what_slurm_rejects_is_said_with_its_reason(project, monkeypatch):
    runs, runner = filler().plan.runs, filler().table.runner
    assert submit([], runner) == 0
    (project / "bin/sbatch").write_text("#!/bin/bash\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    with pytest.raises(StageError, match=r"^`sbatch .*` failed: sbatch: error: invalid partition$"):
        submit(runs, runner)
    monkeypatch.setenv("PATH", str(project))
    with pytest.raises(StageError, match="sbatch is not here"):
        submit(runs, runner)
