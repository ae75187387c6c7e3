"""tools/train.py and tools/test.py, and what they make of a config, on a tiny classifier of MMPretrain."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from config_building import ROOT, run_tool
from trainings import read_scalars

from mapet_mm.engine.runners import launch
from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import (
    LOADER_TIMEOUT,
    LaunchError,
    configure_test,
    configure_training,
    load_config,
    next_command,
    training_report,
)
from mapet_mm.structures import TokenStore, TokenStoreError
from mapet_mm.utils.dist import TIMEOUT_SECONDS
from mapet_mm.utils.precision import choose_dtype


def test_train_writes_checkpoints_and_says_what_and_what_next(trained):
    names = {path.name for path in trained.work.glob("*.pth")}
    assert names == {"epoch_1.pth", "epoch_2.pth", "best_accuracy_top1_epoch_1.pth"}
    assert [line["loss"] > 0 for line in read_scalars(trained.work) if "loss" in line] == [True] * 8
    assert any("accuracy/top1" in line for line in read_scalars(trained.work))
    *_, wrote, following = trained.said.strip().splitlines()
    assert wrote == f"wrote {trained.work}: last checkpoint {trained.work / 'epoch_2.pth'}"
    assert following == f"next: mapet-mm test {trained.config} {trained.work / 'epoch_2.pth'}"


def test_amp_computes_in_half_precision_and_keeps_float32_weights(config, tmp_path, monkeypatch):
    times = {torch.bfloat16: 1, torch.float32: 2}
    monkeypatch.setattr("mapet_mm.utils.precision.product_seconds", times.__getitem__)
    cfg = load_config(str(config), None, str(tmp_path / "work"))
    configure_training(cfg, amp=True, no_validate=True)
    runner = build_runner(cfg, "none")
    seen = set()
    runner.model.head.fc.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    runner.train()
    assert seen == {runner.optim_wrapper.dtype}
    assert seen & {torch.bfloat16, torch.float16}
    assert {value.dtype for value in runner.model.state_dict().values()} == {torch.float32}
    assert not any("accuracy/top1" in line for line in read_scalars(tmp_path / "work"))


def test_none_leaves_out_any_default_hook(config, tmp_path):
    """MMEngine does so for its own ones; of others it says `AssertionError`."""
    options = {f"default_hooks.{name}": None for name in ("timer", "visualization", "class_names_check")}
    cfg = load_config(str(config), options, str(tmp_path / "work"))
    configure_training(cfg)
    hooks = {type(hook).__name__ for hook in build_runner(cfg, "none").hooks}
    assert not hooks & {"IterTimerHook", "VisualizationHook", "ClassNamesCheckHook"}
    assert hooks >= {"LoggerHook", "CheckpointHook", "PortableCheckpointHook"}


@pytest.mark.parametrize(("seconds", "half"), [(0.5, True), (2, False)], ids=["fast", "slow"])
def test_amp_tests_in_half_precision_where_it_is_faster(seconds, half, trained, monkeypatch):
    times = {torch.bfloat16: seconds, torch.float32: 1}
    monkeypatch.setattr("mapet_mm.engine.runners.launch.get_device", lambda: "cpu")
    monkeypatch.setattr("mapet_mm.utils.precision.product_seconds", times.__getitem__)
    cfg = load_config(str(trained.config))
    configure_test(cfg, str(trained.work / "epoch_2.pth"), amp=True)
    assert cfg.test_cfg.get("fp16", False) is half


@pytest.mark.gpu
def test_amp_tests_on_a_gpu_in_the_type_that_it_trains_in(trained):
    cfg = load_config(str(trained.config))
    configure_test(cfg, str(trained.work / "epoch_2.pth"), amp=True)
    assert torch.get_autocast_dtype("cuda") is choose_dtype("cuda")


def test_test_reports_and_keeps_metrics_and_predictions(trained, tmp_path, monkeypatch, capsys):
    checkpoint, outs = trained.work / "epoch_2.pth", [tmp_path / "metrics.json", tmp_path / "predictions.pkl"]
    common = (trained.config, checkpoint, "--work-dir", tmp_path / "work", "--out")
    with pytest.raises(SystemExit, match="out"):
        run_tool(monkeypatch, "test.py", *common, "out.txt")
    run_tool(monkeypatch, "test.py", *common, outs[0], "--amp")
    run_tool(monkeypatch, "test.py", *common, outs[1])
    accuracy = json.loads(outs[0].read_text())["accuracy/top1"]
    predictions = pickle.loads(outs[1].read_bytes())
    right = sum(int(sample["pred_label"] == sample["gt_label"]) for sample in predictions)
    assert len(predictions) == 8
    assert accuracy == pytest.approx(100 * right / 8)
    said = capsys.readouterr().out
    assert str(outs[1]) in said.strip().splitlines()[-1]
    assert "next:" not in said


INIT = "model.backbone.init_cfg"
TRAINING_REFUSED = [
    (dict(optim_wrapper=None), {}, "optim_wrapper"),
    (dict(default_scope="mmrotate"), {}, "`default_scope` mmrotate is a library that is not installed"),
    ({}, dict(resume="gone.pth"), "gone.pth does not exist"),
    (dict(load_from="gone.pth"), {}, "`load_from`: gone.pth"),
    ({INIT: dict(type="Pretrained", checkpoint="")}, {}, "open: --cfg-options"),
    ({INIT: [dict(type="Pretrained", checkpoint="gone.pth")]}, {}, r"init_cfg\.0\.checkpoint` gone.pth"),
]
REMOTE = dict(checkpoint="http://x/y.pth")
TEST_REFUSED = [
    ({}, dict(checkpoint="gone.pth"), "gone.pth does not exist"),
    ({}, REMOTE, "https"),
    (dict(test_dataloader=None), {}, "test_dataloader"),
    (dict(test_evaluator=[]), {}, "test_evaluator"),
    ({}, dict(tta=True), "tta_model"),
]


@pytest.mark.parametrize(("options", "kwargs", "noun"), TRAINING_REFUSED)
def test_training_that_cannot_start_says_which_option_to_change(config, options, kwargs, noun):
    with pytest.raises(LaunchError, match=noun):
        configure_training(load_config(str(config), options), **kwargs)


@pytest.mark.parametrize(("options", "kwargs", "noun"), TEST_REFUSED)
def test_a_test_that_cannot_start_says_which_option_to_change(config, options, kwargs, noun, trained):
    kwargs = {"checkpoint": str(trained.work / "epoch_2.pth"), **kwargs}
    with pytest.raises(LaunchError, match=noun):
        configure_test(load_config(str(config), options), **kwargs)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_suites_own_errors_while_training_are_one_line(config, tmp_path, monkeypatch, workers):
    step = "train_dataloader.dataset.pipeline.0"
    options = [f"{step}.type=mapet_mm.LoadTokenGrid", f"{step}.store={tmp_path}/gone"]
    options += [f"train_dataloader.num_workers={workers}"]
    with pytest.raises(SystemExit) as ended:
        run_tool(monkeypatch, "train.py", config, "--work-dir", tmp_path / "w", "--cfg-options", *options)
    assert f"{tmp_path}/gone" in ended.value.code
    assert "\n" not in ended.value.code


def test_open_weights_give_way_to_load_from(config, tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "weights.pth")
    options = {"load_from": str(tmp_path / "weights.pth"), INIT: dict(type="Pretrained", checkpoint="")}
    cfg = load_config(str(config), options, str(tmp_path / "work"))
    configure_training(cfg)
    assert cfg.model.backbone.init_cfg is None


def test_loaders_fit_the_machine_and_the_library(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = {"val_dataloader.num_workers": 2, "train_dataloader.persistent_workers": True}
    cfg = load_config(str(config), options)
    train, val = cfg.train_dataloader, cfg.val_dataloader
    assert (train.persistent_workers, train.pin_memory, train.timeout) == (False, False, 0)
    assert train.collate_fn.type == "default_collate"
    assert (val.persistent_workers, val.timeout) == (True, LOADER_TIMEOUT)
    assert LOADER_TIMEOUT < TIMEOUT_SECONDS, "the process that hangs speaks before those that wait for it"
    assert "collate_fn" not in load_config(str(config), dict(default_scope="mmseg")).train_dataloader


def test_one_option_adds_a_backend_by_its_type(config):
    """As `--cfg-options "visualizer.vis_backends=[LocalVisBackend,WandbVisBackend]"` gives it."""
    backends = ["LocalVisBackend", {"type": "WandbVisBackend", "commit": True}]
    cfg = load_config(str(config), {"visualizer.vis_backends": backends})
    assert cfg.visualizer.vis_backends == [{"type": "LocalVisBackend"}, backends[1]]


def test_work_dir_is_the_option_then_the_configs_then_the_configs_name(config):
    assert load_config(str(config)).work_dir == f"work_dirs/{config.stem}"
    assert load_config(str(config), dict(work_dir="mine")).work_dir == "mine"
    assert load_config(str(config), dict(work_dir="mine"), "yours").work_dir == "yours"


def test_the_next_command_is_the_recipes_entry(config, monkeypatch):
    cfg = load_config(str(config))
    assert training_report(cfg, "mine.py").startswith(f"wrote {cfg.work_dir} (no checkpoint")
    assert next_command(cfg, "mine.py", "my run/last.pth") == "mapet-mm test mine.py 'my run/last.pth'"
    assert next_command(cfg, "mine.py", "last.pth", ["--cfg-options", "model.head.num_classes=7"]) == (
        "mapet-mm test mine.py last.pth --cfg-options model.head.num_classes=7"
    )
    cfg.test_evaluator = None
    assert next_command(cfg, "mine.py", "last.pth") == ("mapet-mm evaluate mine.py last.pth --data FOLDER")
    monkeypatch.setenv("MAPET_MM_DATA", "digits_inverted")
    recipe = ROOT / "configs/micro/beit_vit-micro_kclip_1xb32-coslr.py"
    assert next_command(load_config(str(recipe)), str(recipe), "last.pth") == (
        "MAPET_MM_DATA=digits_inverted mapet-mm train configs/micro/vit-micro_1xb64-coslr.py "
        "--cfg-options model.backbone.init_cfg.checkpoint=last.pth"
    )


TOKENS = ROOT / "configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py"
STORED = ROOT / "configs/mapet/mapet_vit-tiny-p16_kclip-stored_16xb128-amp-coslr-300e_in1k.py"
ONLINE = ROOT / "configs/mapet/mapet_vit-base-p16_kclip-online_64xb32-amp-coslr-300e_in1k.py"


@pytest.mark.parametrize(
    ("recipe", "options", "expected"),
    [
        (TOKENS, {}, 1),  # the recipe's own
        (TOKENS, dict(custom_hooks=[dict(type="EMAHook")]), 1),
        (TOKENS, {"custom_hooks": None, "default_hooks.token_store_check": None}, 0),
        (ONLINE, dict(custom_hooks=[]), 1),
        (STORED, dict(custom_hooks=[], val_dataloader=None, val_cfg=None, val_evaluator=None), 1),
        (ROOT / "configs/micro/vit-micro_1xb64-scratch-coslr.py", {}, 0),
    ],
    ids=["recipe", "replaced", "told not to", "tokenizer in the model", "stored squares", "no tokens"],
)
def test_every_training_on_tokens_is_checked(recipe, options, expected, tmp_path):
    cfg = load_config(str(recipe), options, str(tmp_path / "work"))
    configure_training(cfg)
    hooks = [*filter(None, cfg.default_hooks.values()), *(cfg.get("custom_hooks") or ())]
    assert [hook["type"] for hook in hooks].count("mapet_mm.TokenStoreCheckHook") == expected


def test_pixels_that_move_without_their_tokens_stop_a_training_whose_config_lists_no_check(
    config, images, tmp_path
):
    """The whole way: the check is built, and sees the pipeline."""
    store = TokenStore.create(tmp_path / "store", sorted_names(images), (4, 4), 8, "tokenizer", str(images))
    store.write(range(8), np.zeros((8, 4, 4), np.uint16))
    load = dict(type="mapet_mm.LoadTokenGrid", store=str(tmp_path / "store"))
    pack = dict(type="PackInputs", algorithm_keys=["token_grid"])
    pipeline = [dict(type="LoadImageFromFile"), dict(type="RandomFlip", prob=0.5), load, pack]
    cfg = load_config(str(config), {"train_dataloader.dataset.pipeline": pipeline}, str(tmp_path / "work"))
    configure_training(cfg, no_validate=True)
    with pytest.raises(TokenStoreError, match="moves pixels"):
        build_runner(cfg, "none").train()


def sorted_names(images: Path) -> list[str]:
    return sorted(str(path.relative_to(images)) for path in images.rglob("*.png"))


def test_a_second_training_in_a_work_dir_is_refused(trained, tmp_path, monkeypatch):
    """Two would write the same checkpoints, and each resume from the other's."""
    monkeypatch.setattr(launch, "CLAIM_SECONDS", 0.1)
    command = [trained.config, "--work-dir", tmp_path, "--cfg-options", "train_cfg.max_epochs=1"]
    with launch.claimed_work_dir(str(tmp_path)):
        with pytest.raises(SystemExit, match=rf"another training is running in {tmp_path}"):
            run_tool(monkeypatch, "train.py", *command)
        monkeypatch.setenv("RANK", "1")  # of the same training
        monkeypatch.setenv("WORLD_SIZE", "2")
        with launch.claimed_work_dir(str(tmp_path)):
            pass
        monkeypatch.setenv("RANK", "0")
    run_tool(monkeypatch, "train.py", *command)
    assert (tmp_path / "epoch_1.pth").is_file()


def test_a_disk_that_is_full_of_logs_is_named(config, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mmengine.visualization.LocalVisBackend.add_scalars", full)
    with pytest.raises(SystemExit, match=rf"No space left on device.*{tmp_path / 'work'}"):
        run_tool(monkeypatch, "train.py", config, "--work-dir", tmp_path / "work")


def test_a_config_without_a_visualizer_takes_the_option_for_backends(config, tmp_path):
    config.write_text(config.read_text().partition("visualizer =")[0])
    options = {"visualizer.vis_backends": ["LocalVisBackend"], "default_hooks.visualization": None}
    cfg = load_config(str(config), options, str(tmp_path / "work"))
    configure_training(cfg)
    assert type(build_runner(cfg, "none").visualizer).__name__ == "Visualizer"
