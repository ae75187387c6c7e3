"""tools/train.py, tools/test.py and their distributed forms, on a tiny classifier of MMPretrain."""

import json
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_training import TOOLS, read_checkpoint, read_scalars, run_tool

from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import (
    LaunchError,
    configure_drawing,
    configure_test,
    configure_training,
    load_config,
    next_command,
    training_report,
)
from mapet_mm.utils.dist import check_gpus
from mapet_mm.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_train_writes_checkpoints_and_says_what_and_what_next(config, tmp_path, monkeypatch, capsys):
    work = tmp_path / "work"
    run_tool(monkeypatch, "train", config, "--work-dir", work)
    assert sorted(path.name for path in work.glob("*.pth")) == ["epoch_1.pth", "epoch_2.pth"]
    assert [line["loss"] > 0 for line in read_scalars(work) if "loss" in line] == [True] * 8
    assert any("accuracy/top1" in line for line in read_scalars(work))
    *_, wrote, following = capsys.readouterr().out.strip().splitlines()
    assert wrote == f"wrote {work}: last checkpoint {work / 'epoch_2.pth'}"
    assert following == f"next: python tools/test.py {config} {work / 'epoch_2.pth'}"


def test_resume_continues_to_the_same_weights_as_an_unbroken_run(config, tmp_path, monkeypatch):
    """A run that was killed in its second epoch: what `--resume` makes of the first one's checkpoint.

    The order of the images depends on seed and epoch alone and the model draws nothing, so they are equal.
    """
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_tool(monkeypatch, "train", config, "--work-dir", whole)
    broken.mkdir()
    shutil.copy(whole / "epoch_1.pth", broken)
    (broken / "last_checkpoint").write_text(str(broken / "epoch_1.pth"))
    run_tool(monkeypatch, "train", config, "--work-dir", broken, "--resume")
    expected, resumed = read_checkpoint(whole, 2), read_checkpoint(broken, 2)
    assert resumed["meta"]["iter"] == expected["meta"]["iter"] == 8
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(resumed["state_dict"][name], value, rtol=0, atol=1e-6)
    assert resumed["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


def test_resume_without_a_checkpoint_keeps_the_configs_load_from(config, tmp_path):
    weights = tmp_path / "weights.pth"
    torch.save({"state_dict": {}}, weights)
    cfg = load_config(str(config), dict(load_from=str(weights)), str(tmp_path / "empty"))
    configure_training(cfg, resume="auto")
    assert (cfg.get("resume", False), cfg.load_from) == (False, str(weights))


def test_options_that_nothing_reads_are_named(config, capsys):
    """`vocab_size`, say, is a variable: what the config makes of it is made when options come."""
    options = {
        "epochs": 3,
        "model.type": "X",
        "train_cfg.max_epochs": 3,
        "optim_wraper.lr": 1.0,
        "codebook.k": 8,
    }
    load_config(str(config), options)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert line.startswith("warning: --cfg-options epochs, optim_wraper: no runner or tool reads this")


def test_open_weights_in_a_list_give_way_to_load_from(config, tmp_path):
    """The other entries of the list stay."""
    torch.save({"state_dict": {}}, tmp_path / "weights.pth")
    open_weights = [dict(type="Pretrained", checkpoint=""), dict(type="Constant", layer="Linear", val=0.5)]
    options = {"load_from": str(tmp_path / "weights.pth"), "model.init_cfg": [*open_weights, open_weights[0]]}
    cfg = load_config(str(config), options, str(tmp_path / "work"))
    configure_training(cfg)
    assert cfg.model.init_cfg == [open_weights[1]]


def test_amp_computes_in_half_precision_and_keeps_float32_weights(config, tmp_path):
    cfg = load_config(str(config), None, str(tmp_path / "work"))
    configure_training(cfg, amp=True)
    runner = build_runner(cfg, "none")
    seen = set()
    runner.model.head.fc.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    runner.train()
    assert seen == {runner.optim_wrapper.dtype, torch.float32}, "training in half precision, validation not"
    assert seen & {torch.bfloat16, torch.float16}
    assert {value.dtype for value in runner.model.state_dict().values()} == {torch.float32}


def test_none_leaves_out_any_default_hook(config, tmp_path):
    """MMEngine does so for its own ones; of others it says `AssertionError`."""
    left_out = ("timer", "visualization", "health", "stride_check")
    options = {f"default_hooks.{name}": None for name in left_out}
    cfg = load_config(str(config), options, str(tmp_path / "work"))
    configure_training(cfg)
    hooks = {type(hook).__name__ for hook in build_runner(cfg, "none").hooks}
    assert not hooks & {"IterTimerHook", "VisualizationHook", "HealthHook", "StrideCheckHook"}
    assert hooks >= {"LoggerHook", "CheckpointHook", "PortableCheckpointHook", "ResumedRecipeHook"}


def test_no_validate_runs_without_validation(config, tmp_path, monkeypatch):
    work = tmp_path / "work"
    run_tool(monkeypatch, "train", config, "--work-dir", work, "--no-validate")
    assert not any("accuracy/top1" in line for line in read_scalars(work))
    assert (work / "epoch_2.pth").is_file()


def test_test_reports_and_keeps_metrics_predictions_and_drawings(config, tmp_path, monkeypatch, capsys):
    work = tmp_path / "work"
    run_tool(monkeypatch, "train", config, "--work-dir", work)
    checkpoint, outs = work / "epoch_2.pth", [tmp_path / "metrics.json", tmp_path / "predictions.pkl"]
    run_tool(monkeypatch, "test", config, checkpoint, "--work-dir", work, "--out", outs[0], "--amp")
    drawn = tmp_path / "drawn"
    run_tool(
        monkeypatch, "test", config, checkpoint, "--work-dir", work, "--out", outs[1], "--show-dir", drawn
    )
    accuracy = json.loads(outs[0].read_text())["accuracy/top1"]
    predictions = pickle.loads(outs[1].read_bytes())
    right = sum(int(sample["pred_label"] == sample["gt_label"]) for sample in predictions)
    assert len(predictions) == len(list(drawn.iterdir())) == 8
    assert accuracy == pytest.approx(100 * right / 8)
    assert str(outs[1]) in capsys.readouterr().out.strip().splitlines()[-1]


TOGETHER = """
import sys
from pathlib import Path
import mapet_mm.engine.runners.launch  # once, for both
from forked_processes import run_together
print(run_together(2, "train.py", *sys.argv[2:], folder=Path(sys.argv[1])))
"""


def test_two_processes_train_together_on_cpu(config, tmp_path):
    """gloo: half the iterations each, one set of weights; the neck's SyncBN needs CUDA and is BatchNorm."""
    work = tmp_path / "work"
    neck = ["type=LinearNeck", "in_channels=16", "out_channels=16", "gap_dim=0", "norm_cfg.type=SyncBN"]
    options = ["train_cfg.max_epochs=1", *(f"model.neck.{option}" for option in neck)]
    arguments = [tmp_path, config, "--work-dir", work, "--launcher", "pytorch", "--cfg-options", *options]
    path = os.pathsep.join([str(TOOLS.parent), str(TOOLS.parent / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-c", TOGETHER, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"wrote {work}" in done.stdout
    assert done.stdout.count("next: python tools/test.py") == 1, "every process reports, not the first alone"
    assert read_checkpoint(work, 1)["meta"]["iter"] == 2
    assert "1 SyncBN layers need CUDA devices and are BatchNorm in this run" in done.stdout + done.stderr
    (log,) = work.glob("*/*.log")
    assert re.search(r"Distributed launcher: pytorch\s", log.read_text())
    assert re.search(r"GPU number: 2\s", log.read_text())
    assert "System environment" not in done.stdout + done.stderr


def test_the_tool_of_several_processes_passes_whole_arguments_on(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "PORT": "4321"}
    arguments = ["config.py", "2", "--work-dir", "work dir", "--cfg-options", "a=[1, 2]"]
    command = ["bash", str(TOOLS / "dist_train.sh"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert {"--nproc_per_node=2", "--master_port=4321"} <= set(lines)
    tool = lines.index(str(TOOLS / "train.py"))
    assert lines[tool + 1 :] == [
        *("config.py", "--work-dir", "work dir", "--cfg-options", "a=[1, 2]", "--launcher", "pytorch")
    ]


def test_cpu_processes_start_gloo_and_keep_the_configs_wrapper_options(config, tmp_path, monkeypatch):
    """A process group on CPU leaves the model wrapper without device ids, and the config's options in it."""
    started = []
    monkeypatch.setattr("mapet_mm.engine.runners.build_runner.get_device", lambda: "cpu")
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *a, **k: started.append((a, k)))
    monkeypatch.setattr("mapet_mm.engine.runners.build_runner.Runner.from_cfg", lambda cfg: cfg)
    options = {"model_wrapper_cfg.static_graph": True, "env_cfg.dist_cfg.timeout": 60}
    cfg = build_runner(load_config(str(config), options, str(tmp_path)), "pytorch")
    assert started[0][0] == ("gloo",)
    assert started[0][1]["timeout"].total_seconds() == 60
    assert cfg.model_wrapper_cfg == dict(
        type="mapet_mm.CPUDistributedDataParallel",
        broadcast_buffers=False,
        find_unused_parameters=False,
        static_graph=True,
        device_ids=None,
    )


@pytest.mark.parametrize(
    ("options", "kwargs", "match"),
    [
        (dict(optim_wrapper=None), {}, "has no `optim_wrapper`"),
        (dict(auto_scale_lr=None), dict(auto_scale_lr=True), "--auto-scale-lr: the config has no"),
        (
            {
                "param_scheduler": [
                    dict(type="LinearLR", end=10),
                    dict(type="CosineAnnealingLR", begin=10, end=2),
                ]
            },
            {},
            "^`param_scheduler.1` begins at 10 and ends at 2: give a later `param_scheduler.1.end`, or an "
            "earlier `param_scheduler.1.begin`, where the scheduler before it then has to end$",
        ),
        (
            {"param_scheduler": dict(_delete_=True, weights=[dict(type="LinearLR", begin=3, end=3)])},
            {},
            "`param_scheduler.weights.0` begins at 3 and ends at 3: ",
        ),
        ({}, dict(resume="gone.pth"), "resume from: gone.pth does not exist"),
        (dict(load_from="gone.pth"), {}, "`load_from`: gone.pth does not exist"),
        (
            {"model.backbone.init_cfg": dict(type="Pretrained", checkpoint="")},
            {},
            r"`model.backbone.init_cfg.checkpoint` open: --cfg-options model.backbone.init_cfg.checkpoint=",
        ),
        (
            {"model.backbone.init_cfg": [dict(type="Pretrained", checkpoint="gone.pth")]},
            {},
            r"`model.backbone.init_cfg.0.checkpoint` gone.pth does not exist",
        ),
        (
            {"model.backbone.init_cfg": dict(type="Pretrained", checkpoint=["a", "b.pth"])},
            {},
            r"is the list \['a', 'b.pth'\]: put a path with a comma into quotes, .*=\"'A,B.pth'\"",
        ),
    ],
)
def test_training_that_cannot_start_says_which_option_to_change(config, options, kwargs, match):
    with pytest.raises(LaunchError, match=match):
        configure_training(load_config(str(config), options), **kwargs)


@pytest.mark.parametrize(
    ("options", "kwargs", "match"),
    [
        ({}, dict(checkpoint="gone.pth"), "checkpoint gone.pth does not exist"),
        (dict(test_dataloader=None), dict(checkpoint="https://x/y.pth"), "has no `test_dataloader`"),
        (
            dict(test_evaluator=[]),
            dict(checkpoint="https://x/y.pth"),
            "`test_evaluator`: .*evaluate_features",
        ),
        ({}, dict(checkpoint="https://x/y.pth", tta=True), "--tta: .* has no `tta_model`"),
        ({}, dict(checkpoint="https://x/y.pth", label_maps="out.txt"), r"--out out.txt: a .pkl file"),
    ],
)
def test_test_that_cannot_start_says_which_option_to_change(config, options, kwargs, match):
    with pytest.raises(LaunchError, match=match):
        configure_test(load_config(str(config), options), **kwargs)


def test_test_time_augmentation_wraps_the_model_and_takes_its_own_pipeline(config):
    steps = [dict(type="LoadImageFromFile"), dict(type="TestTimeAug", transforms=[])]
    cfg = load_config(str(config), dict(tta_model=dict(type="AverageClsScoreTTA"), tta_pipeline=steps))
    model = cfg.model.to_dict()
    configure_test(cfg, "https://x/y.pth", tta=True)
    assert cfg.model.to_dict() == dict(type="AverageClsScoreTTA", module=model)
    assert cfg.test_dataloader.dataset.pipeline == steps


def test_label_maps_are_written_by_the_segmentations_metric(config):
    cfg = load_config(str(config), dict(default_scope="mmseg"))
    configure_test(cfg, "https://x/y.pth", label_maps="maps")
    assert cfg.test_evaluator.output_dir == "maps"


@pytest.mark.parametrize(
    ("scope", "expected", "visualizer"),
    [
        ("mmpretrain", dict(enable=True, out_dir="drawn"), None),
        ("mmseg", dict(draw=True), "drawn"),
        ("mmdet", dict(draw=True, test_out_dir="drawn"), None),
        ("mmrotate", dict(draw=True, test_out_dir="drawn"), None),
    ],
)
def test_predictions_are_drawn_into_the_folder_by_each_librarys_own_option(
    config, scope, expected, visualizer
):
    cfg = load_config(str(config), dict(default_scope=scope))
    configure_drawing(cfg, False, "drawn", 2.0, 5)
    asked = dict(cfg.default_hooks.visualization)
    del asked["type"]
    assert asked == dict(expected, show=False, wait_time=2.0, interval=5)
    assert cfg.visualizer.get("save_dir") == visualizer
    cfg.default_hooks.visualization = None
    with pytest.raises(LaunchError, match=r"--show, --show-dir: the config has no `default_hooks.visualiz"):
        configure_drawing(cfg, True, None, 2.0, 5)


def test_sharding_in_one_process_is_refused_before_anything_is_built(config):
    cfg = load_config(str(config), {"strategy.type": "mapet_mm.FullyShardedStrategy"})
    with pytest.raises(LaunchError, match=r"FullyShardedStrategy needs several processes: tools/dist_train"):
        build_runner(cfg, "none")


def test_a_run_without_checkpoints_says_so(config, tmp_path):
    cfg = load_config(str(config), None, str(tmp_path / "work"))
    assert training_report(cfg, str(config)) == (
        f"wrote {tmp_path / 'work'} (no checkpoint: the config's CheckpointHook saved none)"
    )


def test_missing_config_is_one_line_and_not_a_traceback(monkeypatch):
    with pytest.raises(SystemExit, match=r"^error: config gone.py does not exist$"):
        run_tool(monkeypatch, "train", "gone.py")


def test_a_config_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "wrong.py"
    path.write_text("model = dict(")
    with pytest.raises(SystemExit, match=rf"^error: config {path}: SyntaxError: .*'\(' was never closed"):
        run_tool(monkeypatch, "train", path)
    path.write_text("model = dict(type='x')")
    with pytest.raises(SystemExit, match=r"^error: --cfg-options: "):
        run_tool(monkeypatch, "train", path, "--cfg-options", "model.type.name=1")


@pytest.mark.parametrize("workers", [0, 1])
def test_the_suites_own_errors_while_training_are_one_line(config, tmp_path, monkeypatch, workers):
    """A token store that does not exist, met by the first image, in this process or in a worker."""
    step = "train_dataloader.dataset.pipeline.0"
    options = [f"{step}.type=mapet_mm.LoadTokenGrid", f"{step}.store={tmp_path}/gone"]
    options += [f"train_dataloader.num_workers={workers}"]
    with pytest.raises(SystemExit) as ended:
        run_tool(monkeypatch, "train", config, "--work-dir", tmp_path / "w", "--cfg-options", *options)
    assert ended.value.code.startswith(f"error: token store `{tmp_path}/gone` does not exist: run tools/")
    assert "\n" not in ended.value.code


def test_tensorboard_without_its_package_is_one_line(config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    backend = "visualizer.vis_backends.0.type=TensorboardVisBackend"
    with pytest.raises(SystemExit, match=r"^error: .*tensorboard") as ended:
        run_tool(monkeypatch, "train", config, "--work-dir", tmp_path / "work", "--cfg-options", backend)
    assert "\n" not in ended.value.code


def test_one_option_adds_a_backend_by_its_type(config):
    """As `--cfg-options "visualizer.vis_backends=[LocalVisBackend,WandbVisBackend]"` gives it."""
    backends = ["LocalVisBackend", {"type": "WandbVisBackend", "commit": True}]
    cfg = load_config(str(config), {"visualizer.vis_backends": backends})
    assert cfg.visualizer.vis_backends == [{"type": "LocalVisBackend"}, backends[1]]


def test_launcher_without_cuda_devices_says_which_one_to_use(config, monkeypatch):
    monkeypatch.setattr("mapet_mm.engine.runners.build_runner.get_device", lambda: "cpu")
    with pytest.raises(UserError, match="slurm needs CUDA devices"):
        build_runner(load_config(str(config)), "slurm")


def test_processes_on_gpus_wait_as_long_as_those_on_cpus(config, monkeypatch):
    """PyTorch's own limit for GPUs, ten minutes, ended them while the first one validated."""
    monkeypatch.setattr("mapet_mm.engine.runners.build_runner.get_device", lambda: "cuda")
    monkeypatch.setattr("mapet_mm.engine.runners.build_runner.Runner.from_cfg", lambda cfg: cfg)
    assert build_runner(load_config(str(config)), "pytorch").env_cfg.dist_cfg.timeout == 1800
    options = {"env_cfg.dist_cfg.timeout": 60}
    assert build_runner(load_config(str(config), options), "pytorch").env_cfg.dist_cfg.timeout == 60


def test_more_processes_than_gpus_are_refused(config, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for rank in (2, 3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(UserError, match="4 processes for the 2 GPUs of this machine: start one for each"):
            build_runner(load_config(str(config)), "pytorch")
    monkeypatch.setenv("LOCAL_RANK", "1")
    check_gpus("pytorch")


def test_a_slurm_task_that_sees_one_gpu_takes_it(monkeypatch):
    """Whatever its number is among the tasks of the machine."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("SLURM_LOCALID", "5")
    check_gpus("slurm")
    assert os.environ["SLURM_LOCALID"] == "0"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setenv("SLURM_LOCALID", "5")
    check_gpus("slurm")
    assert os.environ["SLURM_LOCALID"] == "5"


@pytest.mark.parametrize("tool", ["train", "test"])
def test_a_process_of_mpi_has_one_gpu_for_all(tool, monkeypatch):
    """MMEngine puts it on the GPU of MPI's number, and wraps the model on that of LOCAL_RANK."""
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(
        "sys.argv", [tool, "config.py", "--launcher", "mpi", *["last.pth"] * (tool == "test")]
    )
    try:
        runpy.run_path(str(TOOLS / f"{tool}.py"))["parse_args"]()
        assert os.environ["LOCAL_RANK"] == "3"
    finally:
        os.environ.pop("LOCAL_RANK", None)


@pytest.mark.parametrize("script", ["dist_train.sh", "dist_test.sh", "slurm_train.sh", "slurm_test.sh"])
def test_shell_tools_print_their_usage_when_arguments_are_missing(script):
    done = subprocess.run(["bash", str(TOOLS / script), "config.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: bash tools/{script} ")


@pytest.mark.parametrize("script", ["slurm_train.sh", "slurm_test.sh"])
def test_slurm_tools_without_slurm_are_one_line(tmp_path, script):
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    bash, environment = shutil.which("bash"), {"PATH": str(tmp_path)}
    (tmp_path / "bash").symlink_to(bash)
    command = [bash, str(TOOLS / script), "part", "job", "config.py", "work"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    other = script.replace("slurm", "dist")
    assert done.stderr == f"error: srun is not here: start this where Slurm is, or take tools/{other}\n"


def test_slurm_tool_starts_srun_with_gpus_and_passes_arguments_on(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "GPUS": "16", "PYTHON": "py"}
    arguments = ["part", "job", "config.py", "work dir", "--resume", "--cfg-options", "a=[1, 2]"]
    command = ["bash", str(TOOLS / "slurm_train.sh"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert {"--partition=part", "--ntasks=16", "--ntasks-per-node=8", "--gres=gpu:8"} <= set(lines)
    after = ["config.py", "--work-dir", "work dir", "--resume", "--cfg-options", "a=[1, 2]"]
    assert lines[lines.index("py") + 2 :][1:] == [*after, "--launcher", "slurm"]


def test_loaders_fit_the_machine_and_the_library(config, monkeypatch):
    """Batches stacked for MMPretrain alone, memory pinned with a GPU alone, workers that stay."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = {"val_dataloader.num_workers": 2, "train_dataloader.persistent_workers": True}
    cfg = load_config(str(config), options)
    train, val = cfg.train_dataloader, cfg.val_dataloader
    assert (train.persistent_workers, train.pin_memory, train.collate_fn.type) == (
        False, False, "default_collate",
    )  # fmt: skip
    assert val.persistent_workers
    assert "collate_fn" not in load_config(str(config), dict(default_scope="mmseg")).train_dataloader


def test_work_dir_is_the_option_then_the_configs_then_the_configs_name(config):
    assert load_config(str(config)).work_dir == f"work_dirs/{config.stem}"
    assert load_config(str(config), dict(work_dir="mine")).work_dir == "mine"
    assert load_config(str(config), dict(work_dir="mine"), "yours").work_dir == "yours"


def test_the_next_command_is_the_recipes_entry(config, monkeypatch):
    """With the dataset that the recipe was read for; else the training's own test."""
    cfg = load_config(str(config))
    assert next_command(cfg, "mine.py", "last.pth") == "python tools/test.py mine.py last.pth"
    assert next_command(cfg, "mine.py", "my run/last.pth") == "python tools/test.py mine.py 'my run/last.pth'"
    cfg.test_evaluator = None
    assert next_command(cfg, "mine.py", "last.pth") == "python tools/evaluate_features.py mine.py last.pth"
    monkeypatch.setenv("MAPET_MM_DATA", "digits_inverted")
    recipe = TOOLS.parent / "configs/micro/beit_vit-micro_kclip_1xb32-coslr.py"
    assert next_command(load_config(str(recipe)), str(recipe), "last.pth") == (
        "MAPET_MM_DATA=digits_inverted python tools/train.py configs/micro/vit-micro_1xb64-coslr.py "
        "--cfg-options model.backbone.init_cfg.checkpoint=last.pth"
    )
