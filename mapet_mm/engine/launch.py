"""What `tools/train.py` and `tools/test.py` do with a config before and after the run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config, ConfigDict
from mmengine.device import get_device
from mmengine.registry import RUNNERS
from mmengine.runner import Runner, find_latest_checkpoint

from mapet_mm.engine.freed_memory import keep_freed_memory
from mapet_mm.engine.processes import TIMEOUT_SECONDS, start_processes

DATALOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")


class LaunchError(Exception):
    """Something that the user can put right before a run starts; the message is one line."""


def load_config(path: str, cfg_options: dict | None = None, work_dir: str | None = None) -> Config:
    """Read a config, merge `--cfg-options` into it and choose its work dir.

    The work dir is, in this order: `work_dir`, the config's own, `work_dirs/<name of the config>`.
    """
    require_file("config", path)
    cfg = Config.fromfile(path)
    cfg.merge_from_dict(cfg_options or {})
    cfg.work_dir = work_dir or cfg.get("work_dir") or str(Path("work_dirs") / Path(path).stem)
    _complete_dataloaders(cfg)
    return cfg


def require_file(what: str, path: str) -> None:
    """Raise LaunchError unless `path` is a file, or an address that MMEngine can load from."""
    if "://" not in path and not Path(path).is_file():
        raise LaunchError(f"{what} {path} does not exist")


def _complete_dataloaders(cfg: Config) -> None:
    """MMPretrain's batches are stacked in the workers; workers stay; memory is pinned where a GPU is."""
    for loader in (cfg[name] for name in DATALOADERS if cfg.get(name)):
        if cfg.get("default_scope") == "mmpretrain":
            loader.setdefault("collate_fn", dict(type="default_collate"))
        workers = loader.get("num_workers", 0) > 0
        loader.persistent_workers = workers and loader.get("persistent_workers", True)
        loader.pin_memory = torch.cuda.is_available() and loader.get("pin_memory", True)


def configure_training(
    cfg: Config,
    resume: str | None = None,
    amp: bool = False,
    no_validate: bool = False,
    auto_scale_lr: bool = False,
) -> None:
    """Apply the options of `tools/train.py` to a config and check what it needs.

    Args:
        cfg: a config of `load_config`, changed in place.
        resume: 'auto' (the work dir's last checkpoint, or a start from the beginning), or a checkpoint.
        amp: train with `AutocastOptimWrapper`.
        no_validate: leave validation out.
        auto_scale_lr: scale the learning rate to the batch size; the config says which one it is meant for.
    """
    for key in ("model", "train_dataloader", "train_cfg", "optim_wrapper"):
        if not cfg.get(key):
            raise LaunchError(f"config {cfg.filename} has no `{key}`: it cannot be trained")
    if no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    if amp:
        cfg.optim_wrapper.type = "mapet_mm.AutocastOptimWrapper"
    if auto_scale_lr:
        if "base_batch_size" not in (cfg.get("auto_scale_lr") or {}):
            raise LaunchError(
                "--auto-scale-lr: the config has no `auto_scale_lr = dict(base_batch_size=...)`"
            )
        cfg.auto_scale_lr.enable = True
    _configure_start(cfg, resume)
    _check_pretrained(cfg)
    _configure_compilation(cfg)


def _configure_compilation(cfg: Config) -> None:
    """Compile the backbone instead of MMEngine's whole train step, with the same `compile` in the config."""
    if options := cfg.pop("compile", False):
        options = {} if options is True else dict(options)
        cfg.custom_hooks = [*(cfg.get("custom_hooks") or []), dict(type="mapet_mm.CompileHook", **options)]


def _check_pretrained(cfg: Config) -> None:
    """Each `init_cfg=dict(type="Pretrained")` names a file, unless `load_from` brings the weights."""
    for key, init_cfg in list(_pretrained(cfg.model, "model")):
        if init_cfg.checkpoint:
            require_file(f"`{key}.checkpoint`", init_cfg.checkpoint)
        elif cfg.get("load_from"):
            cfg.merge_from_dict({key: None})
        else:
            raise LaunchError(
                f"the config leaves `{key}.checkpoint` open: --cfg-options {key}.checkpoint=CHECKPOINT, "
                f"or {key}=None to start from random weights"
            )


def _configure_start(cfg: Config, resume: str | None) -> None:
    checkpoint = find_latest_checkpoint(cfg.work_dir) if resume == "auto" else resume
    if checkpoint:
        require_file("checkpoint to resume from:", checkpoint)
        cfg.resume, cfg.load_from = True, checkpoint
    elif cfg.get("load_from"):
        require_file("`load_from`:", cfg.load_from)


def _pretrained(node: Any, key: str) -> Iterator[tuple[str, ConfigDict]]:
    """Yield each `init_cfg=dict(type="Pretrained")` inside a part of a config, with its key."""
    if isinstance(node, dict):
        if node.get("type") == "Pretrained" and "checkpoint" in node:
            yield key, node
        for name, child in node.items():
            yield from _pretrained(child, f"{key}.{name}")
    elif isinstance(node, (list, tuple)):
        for index, child in enumerate(node):
            yield from _pretrained(child, f"{key}.{index}")


def configure_test(
    cfg: Config,
    checkpoint: str,
    amp: bool = False,
    tta: bool = False,
    label_maps: str | None = None,
) -> None:
    """Apply the options of `tools/test.py` to a config and check what it needs.

    Args:
        cfg: a config of `load_config`, changed in place.
        checkpoint: the weights to test.
        amp: autocast the forward pass.
        tta: test-time augmentation with the config's `tta_model` and `tta_pipeline`.
        label_maps: folder for predicted label maps (segmentation).
    """
    require_file("checkpoint", checkpoint)
    cfg.load_from = checkpoint
    if not cfg.get("test_dataloader"):
        raise LaunchError(f"config {cfg.filename} has no `test_dataloader`: it cannot be tested")
    if not cfg.get("test_evaluator"):
        raise LaunchError(
            f"config {cfg.filename} has no `test_evaluator`: its test set is for feature extraction; "
            "tools/knn_probe.py and the recipes in configs/mapet/benchmarks evaluate the features"
        )
    if amp:
        cfg.test_cfg.fp16 = True
    if tta:
        if "tta_model" not in cfg or "tta_pipeline" not in cfg:
            raise LaunchError(f"--tta: config {cfg.filename} has no `tta_model` and `tta_pipeline`")
        cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
        cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline
    if label_maps:
        if cfg.get("default_scope") != "mmseg" or not isinstance(cfg.test_evaluator, dict):
            raise LaunchError(f"--out {label_maps}: a .pkl file for predictions, .json or .yml for metrics")
        cfg.test_evaluator.output_dir = label_maps


def configure_drawing(cfg: Config, show: bool, show_dir: str | None, wait_time: float, interval: int) -> None:
    """Let the config's visualization hook draw predictions, in a window or into a folder."""
    hook = (cfg.get("default_hooks") or {}).get("visualization")
    if hook is None:
        raise LaunchError("--show, --show-dir: the config has no `default_hooks.visualization`")
    hook.update(show=show, wait_time=wait_time, interval=interval)
    if cfg.get("default_scope") == "mmseg":
        hook.draw = True
        cfg.visualizer.save_dir = show_dir
    else:
        hook.update(enable=True, out_dir=show_dir)


def build_runner(cfg: Config, launcher: str) -> Runner:
    """Build the config's runner, for one process ('none') or several, with or without GPUs."""
    cfg.launcher = launcher
    if launcher == "none" and "FullyShardedStrategy" in (cfg.get("strategy") or {}).get("type", ""):
        raise LaunchError("`strategy`: FullyShardedStrategy needs several processes: tools/dist_train.sh")
    keep_freed_memory()
    if launcher != "none" and get_device() == "cpu":
        _distribute_on_cpu(cfg, launcher)
    return RUNNERS.build(cfg) if "runner_type" in cfg else Runner.from_cfg(cfg)


def _distribute_on_cpu(cfg: Config, launcher: str) -> None:
    """Start gloo and wrap the model without device ids: MMEngine's own start sets a CUDA device for both."""
    timeout = cfg.get("env_cfg", {}).get("dist_cfg", {}).get("timeout", TIMEOUT_SECONDS)
    try:
        start_processes(launcher, timeout)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    wrapper = dict(
        type="MMDistributedDataParallel",
        broadcast_buffers=False,
        find_unused_parameters=cfg.get("find_unused_parameters", False),
    )
    cfg.model_wrapper_cfg = {**wrapper, **(cfg.get("model_wrapper_cfg") or {}), "device_ids": None}


def training_report(cfg: Config, config_path: str) -> str:
    """Two lines for the end of a training run: what it wrote, and the next command."""
    checkpoint = find_latest_checkpoint(cfg.work_dir)
    if checkpoint is None:
        return f"wrote {cfg.work_dir} (no checkpoint: the config's CheckpointHook saved none)"
    return (
        f"wrote {cfg.work_dir}: last checkpoint {checkpoint}\nnext: {next_command(config_path, checkpoint)}"
    )


def next_command(config_path: str, checkpoint: str) -> str:
    """The command after a training run: a downstream recipe of a pre-trained backbone, else its test.

    Recipes are found by their names: `mapet_vit-tiny-p16_..._in1k.py` is followed by `vit-tiny-p16_...` in
    `benchmarks/` or beside it.
    """
    path = Path(config_path)
    backbone = next((part for part in path.stem.split("_")[1:] if part.startswith("vit-")), None)
    for folder in (path.parent / "benchmarks", path.parent):
        recipes = sorted(folder.glob(f"{backbone}_*.py")) if backbone else []
        if recipes and "upernet" not in path.stem:
            option = f"--cfg-options model.backbone.init_cfg.checkpoint={checkpoint}"
            return f"python tools/train.py {recipes[0]} {option}"
    return f"python tools/test.py {config_path} {checkpoint}"
