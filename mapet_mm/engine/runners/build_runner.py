"""Build the runner of a config, for one process or several, with or without GPUs."""

import logging
import os
from pathlib import Path
from typing import Any

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import is_distributed
from mmengine.logging import MMLogger
from mmengine.model import revert_sync_batchnorm
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader

from mapet_mm.datasets.building import building
from mapet_mm.datasets.label_files import read_grey_labels
from mapet_mm.engine.hooks.total_batch_hook import scaling_with_accumulation
from mapet_mm.utils.dist import TIMEOUT_SECONDS, number_slurm_task, require_gpu_of_its_own, start_processes
from mapet_mm.utils.gpus import allow_deterministic_products
from mapet_mm.utils.loader_workers import bytes_of_batch, usable_workers

# MMEngine adds these hooks itself and accepts None for them; for any other hook None is an error.
OWN_HOOKS = ("runtime_info", "timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")
MAX_LINES = 8  # longer messages go to the log file only; warnings always reach the terminal


class QuietRunner(Runner):
    """MMEngine's Runner; what it logs in many lines stands in the log file only.

    On CPUs, several processes train models with SyncBN, too, each with the statistics of its own images.
    """

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Wrap a model for the run's processes, without SyncBN where it cannot compute."""
        has_sync_bn = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        if has_sync_bn and is_distributed() and get_device() == "cpu":
            self.logger.warning("SyncBN needs GPUs: on CPUs each process takes statistics of its own images")
            model = revert_sync_batchnorm(model)
        return super().wrap_model(model_wrapper_cfg, model)

    @staticmethod
    def build_dataloader(dataloader: DataLoader | dict, *args: Any, **kwargs: Any) -> DataLoader:
        """Build a loader, whose dataset reads label files of three equal channels, too.

        It has fewer workers than the config says if the machine's shared memory is too small for them.
        """
        if isinstance(dataloader, DataLoader):
            return dataloader
        with building(dataloader["dataset"]):
            loader = Runner.build_dataloader(dataloader, *args, **kwargs)
        read_grey_labels(loader.dataset)
        num_workers = usable_workers(loader.num_workers, lambda: bytes_of_batch(loader))
        if num_workers == loader.num_workers:
            return loader
        fewer = {**dataloader, "dataset": loader.dataset, "num_workers": num_workers}
        if not num_workers:
            for name in ("persistent_workers", "prefetch_factor", "timeout"):
                fewer.pop(name, None)
        return Runner.build_dataloader(fewer, *args, **kwargs)

    def build_logger(self, *args: Any, **kwargs: Any) -> MMLogger:
        """Build the logger, and say where the file is."""
        logger = super().build_logger(*args, **kwargs)
        for handler in logger.handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(is_for_terminal)
        logger.info(f"environment and config are in {Path(self.log_dir) / f'{self.timestamp}.log'}")
        return logger


def is_for_terminal(record: logging.LogRecord) -> bool:
    """True for a warning, and for a message of a few lines."""
    return record.levelno > logging.INFO or record.getMessage().count("\n") < MAX_LINES


def build_runner(cfg: Config, launcher: str) -> Runner:
    """Build the config's runner, for one process ('none') or several, with or without GPUs."""
    allow_deterministic_products(cfg.get("randomness") or {})
    cfg.launcher = launcher
    if launcher != "none":
        _start(cfg, launcher)
    hooks = cfg.get("default_hooks") or {}
    for name, hook in list(hooks.items()):
        if hook is None and name not in OWN_HOOKS:
            del hooks[name]
    scaling = scaling_with_accumulation(cfg)
    runner = QuietRunner.from_cfg(cfg)
    runner.auto_scale_lr = scaling
    return runner


def _start(cfg: Config, launcher: str) -> None:
    """Let processes wait long enough, and start gloo where MMEngine would set a CUDA device."""
    number_slurm_task()
    if launcher == "mpi":  # MMEngine's wrapper of the model reads the other name
        os.environ.setdefault("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
    # PyTorch's own limit for GPUs is ten minutes, which a validation in the first process can outlast.
    timeout = (cfg.get("env_cfg") or {}).get("dist_cfg", {}).get("timeout", TIMEOUT_SECONDS)
    cfg.merge_from_dict({"env_cfg": {"dist_cfg": {"timeout": timeout}}})
    wrapper = dict(
        type="MMDistributedDataParallel",
        broadcast_buffers=False,
        find_unused_parameters=cfg.get("find_unused_parameters", False),
        gradient_as_bucket_view=True,  # gradients lie in the buffers that are sent: no copy of either
    )
    own = cfg.get("model_wrapper_cfg") or {}
    require_gpu_of_its_own()
    if get_device() == "cpu":
        start_processes(launcher, timeout)
        cfg.model_wrapper_cfg = {**wrapper, **own, "device_ids": None}
    elif own.get("type", wrapper["type"]) == wrapper["type"]:
        cfg.model_wrapper_cfg = {**wrapper, **own}
