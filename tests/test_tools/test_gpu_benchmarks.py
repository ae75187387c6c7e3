"""What measures a GPU runs before there is one: its steps on tensors without values, all of it on a CPU."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pretrain_throughput
import pytest
import torch
from config_building import ROOT
from pretrain_throughput import VARIANTS, PretrainingStep, kind_of, measure_case
from step_counts import StepCounts, as_on_a_gpu, fake_gpu

from mapet_mm.engine.hooks.compile_hook import CompileHook
from mapet_mm.models.data_preprocessors.data_preprocessor import PixelRange


@pytest.mark.parametrize("name", VARIANTS)
def test_every_benchmarked_step_waits_for_no_gpu(name, monkeypatch):
    """Nothing stays on the host: two devices in one operation would be an error."""
    compiled = []
    monkeypatch.setattr(CompileHook, "compile", lambda hook, model: compiled.append(hook.options))
    monkeypatch.setattr(PixelRange, "check", lambda *_: None)  # as after a first batch
    with as_on_a_gpu(), fake_gpu(), torch.device("cpu"):
        step = PretrainingStep(VARIANTS[name], "tiny", 2, "cuda", num_layers=1)
        with StepCounts() as counts:
            loss = step.loss()
    assert (loss.device.type, loss.requires_grad) == ("cuda", True)
    assert counts.waits.total() == 0
    options = VARIANTS[name].compile
    assert compiled == ([] if options is None else [dict(fullgraph=True, dynamic=False) | options])


def test_a_row_that_fails_is_said_and_the_next_one_measured(monkeypatch, capsys):
    def build(name, *_):
        if name == "mim":
            raise RuntimeError("no memory | left")
        return lambda: torch.zeros(())

    monkeypatch.setattr(pretrain_throughput, "build_step", build)
    monkeypatch.setattr("logging.disable", lambda level: None)  # of its own process
    args = Namespace(variants=["eager", "mim", "pim"], dry_run=True, profile=True)
    with pytest.raises(SystemExit) as ended:
        measure_case("tiny:256", args)
    assert ended.value.code == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows] == ["step", "---", "MaPeT", "MIM", "PIM"]
    assert "RuntimeError: no memory / left" in rows[3]
    assert {row.count("|") for row in rows} == {8}


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("fmha_cutlassF_bf16_aligned_64x64", "attention"),
        ("nvjet_tst_128x256_64x4_TNT", "products"),
        ("triton_poi_fused_add_0", "compiled"),
        ("unknown", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel, kind):
    assert kind_of(kernel) == kind


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout whose data and results are its own."""
    for name in ("configs", "mapet_mm", "pyproject.toml", "tests", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run_kit(checkout: Path, *parts: str) -> subprocess.CompletedProcess:
    environment = os.environ | dict(DRY="1", BUDGET="3000", PYTHON=sys.executable)
    command = ["bash", "tools/benchmarks/gpu.sh", *parts]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def test_a_part_that_nobody_knows_is_refused_before_anything_runs(checkout):
    done = run_kit(checkout, "smoke", "speed")
    assert done.returncode == 2
    assert "no part is called speed: smoke tests bench" in done.stderr
    assert not (checkout / "work_dirs").exists()


@pytest.mark.slow
def test_every_part_of_the_gpu_kit_runs_on_a_cpu_and_is_on_the_page(checkout):
    done = run_kit(checkout)
    page = (checkout / "work_dirs/gpu/page.md").read_text()
    assert done.returncode == 0, done.stdout + page
    for part in ("smoke", "tests", "bench", "compiled", "digits", "methods", "tokens", "profile"):
        assert f"{part}: done in" in page
        assert f"## {part}\n" in page
    assert "torch " in page
    for row in (
        "| MaPeT, as its loop |",
        "| MaPeT, CUDA graphs |",
        "| VisibleMIM |",
        "| BEiT (MMPretrain) |",
    ):
        assert row in page
    assert "| RN50 | float32 |" in page
