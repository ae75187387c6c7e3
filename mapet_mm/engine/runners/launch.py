"""What `tools/train.py` and `tools/test.py` do with a config before and after the run."""

import math
import shlex
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config, ConfigDict
from mmengine.runner import FlexibleRunner, Runner

from mapet_mm.engine.runners.batch_size import check_scaling
from mapet_mm.engine.runners.pretrained import check_pretrained
from mapet_mm.engine.runners.resume import (
    LaunchError,
    differences,
    find_checkpoint,
    later_checkpoints,
    recipe,
    require_checkpoint,
    require_file,
    say,
)
from mapet_mm.utils import config as config_files
from mapet_mm.utils.config import in_package
from mapet_mm.utils.logging import import_quietly

# Entries of a config that MMEngine's runners or this package's tools read.
SETTINGS = {*signature(Runner).parameters, *signature(FlexibleRunner).parameters}
SETTINGS |= {
    "runner_type",
    "compile",
    "model_wrapper_cfg",
    "find_unused_parameters",
    "tta_model",
    "tta_pipeline",
}
SETTINGS |= {"evaluation", "knn_probe", "work_root", "next_config", "data_set"}
SETTINGS |= {"tokenizer", "codebook", "dataset", "data_root", "token_store", "dataloader", "on_error"}
CLASS_NAMES = dict(type="mapet_mm.ClassNamesCheckHook")
DATALOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")


def read_config(path: str, cfg_options: dict | None = None) -> Config:
    """Read a config, merge `--cfg-options` into it, and say which dataset it is for.

    Raises:
        LaunchError: there is no such file, or the options do not fit.
        ConfigError: whatever goes wrong in the file.
    """
    path = in_package(path)
    require_file("config", path)
    cfg = config_files.read_config(path)
    try:
        cfg.merge_from_dict(cfg_options or {})
    except (KeyError, TypeError, AssertionError, AttributeError) as error:
        raise LaunchError(f"--cfg-options: {error}") from error
    unread = sorted({option.split(".")[0] for option in cfg_options or {}} - SETTINGS)
    if unread:
        say(
            f"warning: --cfg-options {', '.join(unread)}: no runner or tool reads this; what the config "
            "makes of its variables is made already, so change that"
        )
    if cfg.get("default_scope") == "mmseg":
        import_quietly("mmseg.datasets")
    if "data_set" in cfg:
        say(f"dataset: {cfg.data_set}")
    return cfg


def load_config(path: str, cfg_options: dict | None = None, work_dir: str | None = None) -> Config:
    """Read a config, merge `--cfg-options` into it and choose its work dir.

    The work dir is, in this order: `work_dir`, the config's own, `<work_root>/<name of the config>`, where
    `work_root` is the config's or `work_dirs`.
    """
    cfg = read_config(path, cfg_options)
    name = Path(cfg.get("work_root", "work_dirs")) / Path(path).stem
    cfg.work_dir = work_dir or cfg.get("work_dir") or str(name)
    _complete_dataloaders(cfg)
    _complete_visualizer(cfg)
    return cfg


def _complete_dataloaders(cfg: Config) -> None:
    """MMPretrain's batches are stacked in the workers; workers stay; memory is pinned where a GPU is."""
    for loader in (cfg[name] for name in DATALOADERS if cfg.get(name)):
        if cfg.get("default_scope") == "mmpretrain":
            loader.setdefault("collate_fn", dict(type="default_collate"))
        workers = loader.get("num_workers", 0) > 0
        loader.persistent_workers = workers and loader.get("persistent_workers", True)
        loader.pin_memory = torch.cuda.is_available() and loader.get("pin_memory", True)


def _complete_visualizer(cfg: Config) -> None:
    """Accept the type of a backend alone, because `--cfg-options` cannot give a list of dicts."""
    visualizer = cfg.get("visualizer") or {}
    if isinstance(backends := visualizer.get("vis_backends"), (list, tuple)):
        visualizer.vis_backends = [dict(type=b) if isinstance(b, str) else b for b in backends]


def configure_training(
    cfg: Config,
    resume: str | None = None,
    amp: bool = False,
    no_validate: bool = False,
    auto_scale_lr: bool = False,
    trust_checkpoint: bool = False,
) -> None:
    """Apply the options of `tools/train.py` to a config and check what it needs.

    Args:
        cfg: a config of `load_config`, changed in place.
        resume: 'auto' (the work dir's last checkpoint, or a start from the beginning), or a checkpoint. None
            goes on from the work dir's last one if that is of the same config, and refuses another's.
        amp: train with `AutocastOptimWrapper`.
        no_validate: leave validation out.
        auto_scale_lr: scale the learning rate to the batch size; the config says which one it is meant for.
        trust_checkpoint: load checkpoints whatever they hold, which can run code of theirs.

    Raises:
        LaunchError: the run cannot start like this.
    """
    for key in ("model", "train_dataloader", "train_cfg", "optim_wrapper"):
        if not cfg.get(key):
            raise LaunchError(f"config {cfg.filename} has no `{key}`: it cannot be trained")
    if no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    if amp:
        cfg.optim_wrapper.type = "mapet_mm.AutocastOptimWrapper"
    if auto_scale_lr:
        cfg.auto_scale_lr = ConfigDict(cfg.get("auto_scale_lr") or {}, enable=True)
    check_scaling(cfg)
    _check_schedulers(cfg.get("param_scheduler") or [])
    _configure_compilation(cfg)
    digests = recipe(cfg)
    hook = dict(type="mapet_mm.PortableCheckpointHook", recipe=digests)
    own = dict(
        resumed_recipe=dict(type="mapet_mm.ResumedRecipeHook"),
        stride_check=dict(type="mapet_mm.StrideCheckHook"),
        class_names_check=CLASS_NAMES,
    )
    cfg.default_hooks = ConfigDict({**own, **(cfg.get("default_hooks") or {}), "portable_checkpoint": hook})
    _configure_start(cfg, digests, resume, trust_checkpoint)
    check_pretrained(cfg, trust_checkpoint)


def _check_schedulers(node: Any, name: str = "param_scheduler") -> None:
    """Refuse a scheduler that ends before it begins, as where `--cfg-options` changed one of both alone."""
    if isinstance(node, dict) and "type" in node:
        begin, end = node.get("begin", 0), node.get("end", math.inf)
        if begin >= end:
            raise LaunchError(
                f"`{name}` begins at {begin} and ends at {end}: give a later `{name}.end`, or an earlier "
                f"`{name}.begin`, where the scheduler before it then has to end"
            )
        return
    entries = dict(enumerate(node)) if isinstance(node, (list, tuple)) else node
    for key, one in entries.items() if isinstance(entries, dict) else ():
        _check_schedulers(one, f"{name}.{key}")


def _configure_compilation(cfg: Config) -> None:
    """Compile the backbone instead of MMEngine's whole train step, with the same `compile` in the config."""
    if options := cfg.pop("compile", False):
        options = {} if options is True else dict(options)
        cfg.custom_hooks = [*(cfg.get("custom_hooks") or []), dict(type="mapet_mm.CompileHook", **options)]


def _configure_start(cfg: Config, digests: dict[str, str], resume: str | None, trust: bool) -> None:
    """Go on from a checkpoint, take the weights of one, or start from the beginning."""
    if resume is None and cfg.get("resume"):  # True, or a checkpoint
        resume = cfg.resume if isinstance(cfg.resume, str) else cfg.get("load_from") or "auto"
    if resume in (None, "auto"):
        checkpoint = find_checkpoint(cfg, trust)
        if checkpoint:
            _announce(cfg, digests, checkpoint, asked=resume == "auto")
    else:
        checkpoint = resume
        require_checkpoint("checkpoint to resume from:", checkpoint, trust)
        _announce(cfg, digests, checkpoint, asked=True)
    cfg.resume = bool(checkpoint)
    if checkpoint:
        if later := later_checkpoints(cfg, checkpoint):
            say(f"warning: {cfg.work_dir} holds {', '.join(later)}, which this run writes again")
        cfg.load_from = checkpoint
    elif cfg.get("load_from"):
        require_checkpoint("`load_from`:", cfg.load_from, trust)


def _announce(cfg: Config, digests: dict[str, str], checkpoint: str, asked: bool) -> None:
    """Say that the run goes on; refuse to, unless asked, with a config that is not the checkpoint's."""
    changed = ", ".join(f"`{name}`" for name in differences(digests, checkpoint))
    if changed and not asked:
        raise LaunchError(
            f"{cfg.work_dir} holds a training with another config ({changed} differ): another --work-dir "
            f"starts a new one, --resume goes on from {checkpoint} all the same"
        )
    note = f"; {changed} of the config differ from what it was trained with, and count now" if changed else ""
    say(f"going on from {checkpoint}{note} (another --work-dir starts a new training)")


def configure_test(
    cfg: Config,
    checkpoint: str,
    amp: bool = False,
    tta: bool = False,
    label_maps: str | None = None,
    trust_checkpoint: bool = False,
) -> None:
    """Apply the options of `tools/test.py` to a config and check what it needs.

    Args:
        cfg: a config of `load_config`, changed in place.
        checkpoint: the weights to test.
        amp: autocast the forward pass.
        tta: test-time augmentation with the config's `tta_model` and `tta_pipeline`.
        label_maps: folder for predicted label maps (segmentation).
        trust_checkpoint: load it whatever it holds, which can run code of its own.

    Raises:
        LaunchError: the test cannot start like this.
    """
    require_checkpoint("checkpoint", checkpoint, trust_checkpoint)
    cfg.load_from, cfg.resume = checkpoint, False
    cfg.default_hooks = ConfigDict({"class_names_check": CLASS_NAMES, **(cfg.get("default_hooks") or {})})
    if not cfg.get("test_dataloader"):
        raise LaunchError(f"config {cfg.filename} has no `test_dataloader`: it cannot be tested")
    if not cfg.get("test_evaluator"):
        raise LaunchError(
            f"config {cfg.filename} has no `test_evaluator`: its test set is for feature extraction; "
            "tools/evaluate_features.py and the recipes in configs/mapet/benchmarks evaluate the features"
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
    elif cfg.get("default_scope") in ("mmdet", "mmrotate"):
        hook.update(draw=True, test_out_dir=show_dir)  # inside the work dir
    else:
        hook.update(enable=True, out_dir=show_dir)


def training_report(cfg: Config, config_path: str) -> str:
    """Two lines for the end of a training run: what it wrote, and the next command."""
    checkpoint = find_checkpoint(cfg, trust=True)
    if checkpoint is None:
        return f"wrote {cfg.work_dir} (no checkpoint: the config's CheckpointHook saved none)"
    following = next_command(cfg, config_path, checkpoint)
    return f"wrote {cfg.work_dir}: last checkpoint {checkpoint}\nnext: {following}"


def next_command(cfg: Config, config_path: str, checkpoint: str) -> str:
    """The command after a training: the recipe that `next_config` names, the test or the features."""
    tool = "test" if cfg.get("test_evaluator") else "evaluate_features"
    if following := cfg.get("next_config"):
        option = f"model.backbone.init_cfg.checkpoint={checkpoint}"
        words = ["tools/train.py", following, "--cfg-options", option]
    else:
        words = [f"tools/{tool}.py", config_path, checkpoint]
    return config_files.typed(cfg, shlex.join(["python", *words]))
