"""Build the runner of a config, for one process or several, with or without GPUs."""

from pathlib import Path
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.device import get_device
from mmengine.logging import MMLogger
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from mapet_mm.engine.runners.batch_size import describe_scaling, scaling_with_accumulation
from mapet_mm.engine.runners.freed_memory import keep_freed_memory
from mapet_mm.engine.runners.resume import LaunchError
from mapet_mm.utils.config import type_name
from mapet_mm.utils.dist import TIMEOUT_SECONDS, check_gpus, import_yapf, start_processes
from mapet_mm.utils.logging import quieten

# Those that MMEngine has without being asked for: None leaves them out.
OWN_HOOKS = ("runtime_info", "timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")


class QuietRunner(Runner):
    """MMEngine's Runner; what it logs in many lines stands in the log file only."""

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Build the logger, and say where the file is."""
        logger = quieten(super().build_logger(*args, **kwargs))
        logger.info(f"environment and config are in {Path(self._log_dir) / f'{self.timestamp}.log'}")
        return logger


def build_runner(cfg: Config, launcher: str) -> Runner:
    """Build the config's runner, for one process ('none') or several, with or without GPUs."""
    cfg.launcher = launcher
    strategy = (cfg.get("strategy") or {}).get("type", "")
    if launcher == "none" and type_name(strategy) == "FullyShardedStrategy":
        raise LaunchError("`strategy`: FullyShardedStrategy needs several processes: tools/dist_train.sh")
    keep_freed_memory()
    import_yapf()
    if launcher != "none":
        check_gpus(launcher)
        # PyTorch's own limit for GPUs is ten minutes, which a validation in the first process can outlast.
        cfg.merge_from_dict({"env_cfg": {"dist_cfg": {"timeout": _timeout(cfg)}}})
        if get_device() == "cpu":
            _distribute_on_cpu(cfg, launcher)
    _leave_hooks_out(cfg)
    scaling = scaling_with_accumulation(cfg)
    if "runner_type" in cfg:
        if scaling:
            default = dict(type="SingleDeviceStrategy" if launcher == "none" else "DDPStrategy")
            cfg.strategy = ConfigDict(cfg.get("strategy") or default, auto_scale_lr=scaling)
        runner = RUNNERS.build(cfg)
    else:
        runner = QuietRunner.from_cfg(cfg)
        runner.auto_scale_lr = scaling
    if scaling and scaling.get("enable", False) and cfg.get("train_dataloader"):
        runner.logger.info(describe_scaling(cfg, runner.world_size))
    return runner


def _leave_hooks_out(cfg: Config) -> None:
    """Let None leave out any of the `default_hooks`; of those that are not its own MMEngine refuses it."""
    hooks = cfg.get("default_hooks") or {}
    for name in [name for name, hook in hooks.items() if hook is None and name not in OWN_HOOKS]:
        del hooks[name]


def _timeout(cfg: Config) -> int:
    """Seconds that processes wait for each other."""
    return cfg.get("env_cfg", {}).get("dist_cfg", {}).get("timeout", TIMEOUT_SECONDS)


def _distribute_on_cpu(cfg: Config, launcher: str) -> None:
    """Start gloo and wrap the model without device ids: MMEngine's own start sets a CUDA device for both."""
    start_processes(launcher, _timeout(cfg))
    wrapper = dict(
        type="mapet_mm.CPUDistributedDataParallel",
        broadcast_buffers=False,
        find_unused_parameters=cfg.get("find_unused_parameters", False),
    )
    cfg.model_wrapper_cfg = {**wrapper, **(cfg.get("model_wrapper_cfg") or {}), "device_ids": None}
