"""Configs of `mapet-mm train` and `mapet-mm test` before the run, and their report after it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from filelock import Timeout
from mmengine.config import Config, ConfigDict
from mmengine.device import get_device

from mapet_mm.engine.hooks.total_batch_hook import check_accumulation
from mapet_mm.engine.runners.recipe import (
    config_digests,
    differences,
    digest_but_for_fused,
    recorded_digests,
)
from mapet_mm.engine.runners.resume import check_pretrained, find_checkpoint, require_checkpoint
from mapet_mm.engine.runners.schedule import check_checkpoints, check_schedule, is_of_type, lists_hook
from mapet_mm.models.target_generators.tokenizer import Tokenizer
from mapet_mm.registry import MODELS
from mapet_mm.utils import config as config_files
from mapet_mm.utils.commands import next_line
from mapet_mm.utils.config import class_of, nodes, require_entries
from mapet_mm.utils.dist import is_first_process, local_rank, print_to_user
from mapet_mm.utils.errors import LaunchError
from mapet_mm.utils.gpus import require_usable_gpu
from mapet_mm.utils.precision import choose_dtype
from mapet_mm.utils.shared_work import shared_lock

LABEL_CHECKS = dict(
    class_names_check=dict(type="mapet_mm.ClassNamesCheckHook"),
    label_files_check=dict(type="mapet_mm.LabelFilesCheckHook"),
)
TOKEN_STORE_CHECK = dict(type="mapet_mm.TokenStoreCheckHook")
PORTABLE_CHECKPOINT = dict(type="mapet_mm.PortableCheckpointHook")
DATALOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")
# Seconds that a batch of a loader's workers may take: less than processes wait for each other.
LOADER_TIMEOUT = 1200
LOCK = ".training.lock"  # in a work dir
CLAIM_SECONDS = 10


def read_config(path: str, cfg_options: dict | None = None) -> Config:
    """Read a config, merge `--cfg-options` into it, and say which dataset it is for."""
    cfg = config_files.read_config(path, options=cfg_options)
    if "data_set" in cfg:
        print_to_user(f"dataset: {cfg.data_set}")
    return cfg


def load_config(path: str, cfg_options: dict | None = None, work_dir: str | None = None) -> Config:
    """Read a config, merge `--cfg-options` into it and complete its work dir and its loaders.

    The work dir is, in this order: `work_dir`, the config's own, `<work_root>/<name of the config>`, where
    `work_root` is the config's or `work_dirs`.
    """
    cfg = read_config(path, cfg_options)
    scope = cfg.get("default_scope")
    if scope in config_files.LIBRARIES and find_spec(scope) is None:
        raise LaunchError(f"config {path}: its `default_scope` {scope} is a library that is not installed")
    name = Path(cfg.get("work_root", "work_dirs")) / Path(path).stem
    cfg.work_dir = work_dir or cfg.get("work_dir") or str(name)
    for loader in (cfg[name] for name in DATALOADERS if cfg.get(name)):
        if cfg.get("default_scope") == "mmpretrain":  # its batches are stacked in the workers
            loader.setdefault("collate_fn", dict(type="default_collate"))
        workers = loader.get("num_workers", 0) > 0
        loader.persistent_workers = workers and loader.get("persistent_workers", True)
        loader.pin_memory = torch.cuda.is_available() and loader.get("pin_memory", True)
        loader.timeout = loader.get("timeout", LOADER_TIMEOUT) if workers else 0
    if cfg.get("visualizer"):
        cfg.visualizer.setdefault("type", "Visualizer")  # MMEngine's, as for a config without any
        backends = cfg.visualizer.get("vis_backends")
        if isinstance(backends, (list, tuple)):
            backends = list(backends)
            for index, backend in enumerate(backends):
                if isinstance(backend, str):  # `--cfg-options` cannot give a list of dicts
                    backends[index] = dict(type=backend)
            cfg.visualizer.vis_backends = backends
    return cfg


@contextmanager
def claimed_work_dir(work_dir: str) -> Iterator[None]:
    """Keep other trainings out of a work dir while this context lasts.

    A killed training's loader workers hold on to it for some seconds, so a claim waits that long.

    Raises:
        LaunchError: another training is writing into it.
    """
    if not is_first_process():
        yield
        return
    Path(work_dir).mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(shared_lock(Path(work_dir, LOCK), CLAIM_SECONDS))
        except Timeout:
            raise LaunchError(
                f"another training is running in {work_dir}: wait for its end, or take another --work-dir"
            ) from None
        yield


def configure_training(
    cfg: Config,
    resume: str | None = None,
    amp: bool = False,
    no_validate: bool = False,
    auto_scale_lr: bool = False,
    trust_checkpoint: bool = False,
) -> None:
    """Apply the options of `mapet-mm train` to a config and check what it needs.

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
        UserError: there is a GPU that this PyTorch cannot use.
    """
    require_usable_gpu(local_rank())
    require_entries(cfg, "model", "train_dataloader", "train_cfg", "optim_wrapper")
    if no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    if amp:
        cfg.optim_wrapper.type = "mapet_mm.AutocastOptimWrapper"
    if auto_scale_lr:
        cfg.auto_scale_lr = ConfigDict(cfg.get("auto_scale_lr") or {}, enable=True)
    check_accumulation(cfg)
    check_schedule(cfg)
    check_checkpoints(cfg)
    _compile_by_hook(cfg)
    digests = config_digests(cfg)
    _configure_start(cfg, digests, resume, trust_checkpoint)
    checks = dict(LABEL_CHECKS)
    if needs_token_check(cfg):
        checks["token_store_check"] = TOKEN_STORE_CHECK
    own = dict(portable_checkpoint=dict(PORTABLE_CHECKPOINT, recipe=digests))
    cfg.default_hooks = ConfigDict({**checks, **(cfg.get("default_hooks") or {}), **own})
    check_pretrained(cfg, trust_checkpoint)
    _let_mmengine_load(trust_checkpoint)


def _compile_by_hook(cfg: Config) -> None:
    """Let `CompileHook` do what `compile` says: MMEngine would compile the whole train step."""
    options = cfg.pop("compile", None)
    if options is None:
        return
    # In place of what a recipe decides.
    hooks = cfg.get("default_hooks") or {}
    others = {name: hook for name, hook in hooks.items() if not is_of_type(hook, "CompileHook")}
    cfg.default_hooks = ConfigDict(others)
    if options:
        hook = dict(type="mapet_mm.CompileHook")
        if options is not True:
            hook.update(options)
        cfg.custom_hooks = [*(cfg.get("custom_hooks") or []), hook]


def needs_token_check(cfg: Config) -> bool:
    """True if a config trains on token grids, stored or made in the model, and lists no check of its own.

    A config that replaces the `custom_hooks` of a recipe drops the recipe's check with them.
    """
    if lists_hook(cfg, "TokenStoreCheckHook"):
        return False
    for _, node in nodes([cfg.train_dataloader, cfg.get("val_dataloader")]):
        if is_of_type(node, "LoadTokenGrid") or is_of_type(node, "StoredImages"):
            return True
    generator = cfg.model.get("target_generator")
    kind = class_of(generator["type"], MODELS) if generator else None
    return isinstance(kind, type) and issubclass(kind, Tokenizer)


def _configure_start(cfg: Config, digests: dict[str, str], resume: str | None, trust: bool) -> None:
    """Go on from a checkpoint, take the weights of one, or start from the beginning.

    Where only `fused` differs, the digests become the checkpoint's.
    """
    if resume is None and cfg.get("resume"):  # True, or a checkpoint
        resume = cfg.resume if isinstance(cfg.resume, str) else cfg.get("load_from") or "auto"
    if resume in (None, "auto"):
        checkpoint = find_checkpoint(cfg)
        if checkpoint:
            require_checkpoint("last checkpoint", checkpoint, trust)
    else:
        checkpoint = require_checkpoint("checkpoint to resume from:", resume, trust)
    cfg.resume = bool(checkpoint)
    if not checkpoint:
        if cfg.get("load_from"):
            cfg.load_from = require_checkpoint("`load_from`:", cfg.load_from, trust)
        return
    cfg.load_from = checkpoint
    before = recorded_digests(checkpoint, trust)
    digests.update(digest_but_for_fused(cfg, before))
    changed = ", ".join(f"`{name}`" for name in differences(digests, before))
    if changed and resume is None:
        raise LaunchError(
            f"{cfg.work_dir} holds a training with another config ({changed} differ): another --work-dir "
            f"starts a new one, --resume goes on from {checkpoint} all the same"
        )
    note = f"; {changed} differ, and the learning rate is the config's at that step" if changed else ""
    print_to_user(f"going on from {checkpoint}{note} (another --work-dir starts a new training)")


def configure_test(
    cfg: Config, checkpoint: str, amp: bool = False, tta: bool = False, trust_checkpoint: bool = False
) -> None:
    """Apply the options of `mapet-mm test` to a config and check what it needs.

    Args:
        cfg: a config of `load_config`, changed in place.
        checkpoint: the weights to test.
        amp: autocast the forward pass, as `AutocastOptimWrapper` does.
        tta: test-time augmentation with the config's `tta_model` and `tta_pipeline`.
        trust_checkpoint: load it whatever it holds, which can run code of its own.

    Raises:
        LaunchError: the run cannot start like this.
        UserError: there is a GPU that this PyTorch cannot use.
    """
    require_usable_gpu(local_rank())
    cfg.load_from = require_checkpoint("checkpoint", checkpoint, trust_checkpoint)
    cfg.resume = False
    _let_mmengine_load(trust_checkpoint)
    own = dict(LABEL_CHECKS, portable_checkpoint=PORTABLE_CHECKPOINT)
    cfg.default_hooks = ConfigDict({**own, **(cfg.get("default_hooks") or {})})
    require_entries(cfg, "test_dataloader", "test_evaluator")
    if amp:
        device = get_device()
        dtype = choose_dtype(device)
        # MMEngine's name for autocast, on GPUs in float16 unless told otherwise.
        cfg.test_cfg.fp16 = dtype is not torch.float32
        if cfg.test_cfg.fp16:
            torch.set_autocast_dtype(device, dtype)
    if tta:
        require_entries(cfg, "tta_model", "tta_pipeline")
        cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
        cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline


def _let_mmengine_load(objects: bool) -> None:
    if objects:  # MMEngine 0.10.7 leaves it to PyTorch's default
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"


def training_report(cfg: Config, config_path: str, options: Sequence[str] = ()) -> str:
    """Two lines for the end of a training run: the last checkpoint, and the next command.

    Args:
        cfg: of the training.
        config_path: its file.
        options: `--cfg-options` and what was given with it, which a test takes, too.
    """
    checkpoint = find_checkpoint(cfg)
    if checkpoint is None:
        return f"wrote {cfg.work_dir} (no checkpoint: the config's CheckpointHook saved none)"
    following = next_line(next_command(cfg, config_path, checkpoint, options))
    return f"wrote {cfg.work_dir}: last checkpoint {checkpoint}{following}"


def next_command(cfg: Config, config_path: str, checkpoint: str, options: Sequence[str] = ()) -> str:
    """The command after a training: the recipe that `next_config` names, the test or the features."""
    following = cfg.get("next_config")
    if following:
        option = f"model.backbone.init_cfg.checkpoint={checkpoint}"
        words = ["train", following, "--cfg-options", option]
    elif cfg.get("test_evaluator"):
        words = ["test", config_path, checkpoint, *options]
    else:
        words = ["evaluate", config_path, checkpoint]
        if "evaluation" not in cfg:
            words += ["--data", "FOLDER"]
        words += options
    return config_files.shell_command(cfg, words)
