"""A table through Snakemake: its plan, real runs side by side, and kills at any moment.

make test-research        sets up the environment with Snakemake and runs this
"""

import random
import re
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from short_table import ROOT, SNAKEMAKE, make_project, shown, snakemake

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("snakemake") is None, reason="needs Snakemake: make test-research"),
]
KILLS = 5


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """The project, filled without any disturbance."""
    folder = make_project(tmp_path_factory.mktemp("filled"))
    snakemake(folder, "-j2")
    return folder


def records(folder: Path) -> dict[str, int]:
    """When each run's record was written, by the run's key."""
    found = (folder / "work_dirs/tables/runs").glob("*/record.json")
    return {file.parent.name: file.stat().st_mtime_ns for file in found}


def progress(folder: Path) -> int:
    """Number of records, logs and checkpoints: it grows several times in each run."""
    runs = folder / "work_dirs/tables/runs"
    return sum(len([*runs.glob(pattern)]) for pattern in ("*/record.json", "*/run.log", "*/epoch_*.pth"))


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL to a process and to everything that it has started."""
    import psutil

    main = psutil.Process(process.pid)
    for one in [main, *main.children(recursive=True)]:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def test_a_dry_run_prints_every_command_and_runs_nothing(tmp_path):
    folder = make_project(tmp_path)
    printed = snakemake(folder, "-n", "-j2")
    tools = re.findall(r"^Job \d+: .*?python (\S+\.py)", printed, re.MULTILINE)
    assert sorted(tools) == [
        "research/measure_tokens.py",
        "tools/dataset_converters/digits.py",
        "tools/extract_tokens.py",
        "tools/fit_codebook.py",
        *3 * ["tools/train.py"],
    ]
    assert not (folder / "work_dirs").exists()


def test_imagenet_asks_for_the_gpus_of_its_recipes_and_says_what_is_missing(tmp_path):
    """MaPeT's ViT-B is meant for 64 processes: eight machines of eight GPUs."""
    words = ["-s", str(ROOT / "research/Snakefile"), "-n", "--printshellcmds", "--verbose"]
    done = subprocess.run(
        [*SNAKEMAKE[:3], *words, "--config", "table=imagenet/transfer", 'rows=["MaPeT, VQ-KD"]'],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-2000:]
    assert (
        "srun --nodes=8 --ntasks=64 --kill-on-bad-exit=1 python -u tools/train.py configs/mapet/" in printed
    )
    assert "bash tools/dist_train.sh configs/mapet/benchmarks/vit-base" in printed


def test_a_table_is_filled_once_and_written_again_at_each_call(filled):
    before = records(filled)
    assert len(before) == 7
    assert "Two rows: 4 of 4 results are there" in snakemake(filled, "-j2")
    assert records(filled) == before


def test_killed_at_random_moments_and_continued_the_table_is_that_of_an_undisturbed_run(filled, tmp_path):
    folder = make_project(tmp_path)
    moments = random.Random(0)
    done = {}
    for _ in range(KILLS):
        process = subprocess.Popen(
            [*SNAKEMAKE, "-j2"], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        before = progress(folder)
        while progress(folder) == before:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.2)
        time.sleep(moments.uniform(0, 8))
        kill_tree(process)
        # What was finished stays as it is.
        assert records(folder).items() >= done.items()
        done = records(folder)
        snakemake(folder, "--unlock")
    assert len(done) < 7
    snakemake(folder, "-j2")
    assert records(folder).items() >= done.items()
    assert shown(folder) == shown(filled)


def test_an_edited_recipe_is_another_result_and_its_old_figure_does_not_count(filled):
    """The probe at twice its rate has other runs; back at the old rate, the old figure is there again."""
    table = filled / "research/tables/mine.py"
    before, text = shown(filled), table.read_text()
    changed = text.replace(
        '{"train_cfg.max_epochs": 3,', '{"optim_wrapper.optimizer.lr": 0.4, "train_cfg.max_epochs": 3,'
    )
    assert changed != text
    table.write_text(changed)
    printed = snakemake(filled, "-n", "-j2")
    assert sum("tools/train.py configs/micro/vit-micro_1xb128" in line for line in printed.splitlines()) == 2
    table.write_text(text)
    snakemake(filled, "-j2")
    assert shown(filled) == before
