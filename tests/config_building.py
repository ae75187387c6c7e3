"""Builds what a config declares without data, network or memory: models on the meta device."""

import re
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from mmengine.config import Config
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import MODELS, PARAM_SCHEDULERS, DefaultScope
from torch import nn

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(
    path for path in (ROOT / "configs").rglob("*.py") if not {"_base_", "evaluation"} & set(path.parts)
)

read = cache(Config.fromfile)  # a fifth of a second each


def is_buildable(path: Path) -> bool:
    """MMDetection, MMRotate and MMPose are in an environment of their own (make test-detection)."""
    cfg = read(path)
    has_parts_of_mmdet = "'mmdet." in str(cfg.get("model"))
    scope = cfg.get("default_scope", "mmpretrain")
    return find_spec(scope) is not None and (find_spec("mmdet") is not None or not has_parts_of_mmdet)


BUILDABLE = [path for path in CONFIGS if is_buildable(path)]
TOKENIZERS = [path for path in CONFIGS if "tokenizer" in read(path) and "model" not in read(path)]
# A model without a backbone is a tokenizer's own network.
RECIPES = [path for path in BUILDABLE if "backbone" in (read(path).get("model") or {})]
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")


def index_models() -> list[dict]:
    """The models of `model-index.yml`, which imports the methods' metafiles."""
    imported = yaml.safe_load((ROOT / "model-index.yml").read_text())["Import"]
    return [model for file in imported for model in yaml.safe_load((ROOT / file).read_text())["Models"]]


def label(path: Path) -> str:
    """Name of a config in test ids."""
    return path.stem


def load(path: Path) -> Config:
    """A config of one's own to work on."""
    return deepcopy(read(path))


def in_scope(cfg: Config):
    """Context in which types without a prefix are those of the config's library."""
    return DefaultScope.overwrite_default_scope(cfg.default_scope)


def build_model(cfg: Config) -> nn.Module:
    """Build the model as MMEngine's Runner does, but on the meta device: shapes and no memory.

    MMPretrain's CAE and MMSegmentation's Segmenter read numbers from tensors while they are built: they get
    memory. A tokenizer that runs in the model would be downloaded, so stored tokens take its place.
    """
    model = cfg.model.copy()
    if "tokenizer" in cfg:
        model.target_generator = dict(type="mapet_mm.PrecomputedTokens", vocab_size=8192)
    if "data_preprocessor" in cfg:
        model.setdefault("data_preprocessor", cfg.data_preprocessor)
    parts = model.type + model.get("decode_head", {}).get("type", "")
    with in_scope(cfg), torch.device("cpu" if "CAE" in parts or "Segmenter" in parts else "meta"):
        return MODELS.build(model)


def optim_wrapper_of(cfg: Config, model: nn.Module) -> OptimWrapper:
    """Build the optimizer wrapper, through its constructor, as MMEngine's Runner does."""
    with in_scope(cfg):
        return build_optim_wrapper(model, cfg.optim_wrapper.copy())


def learning_rates(cfg: Config, optimizer: torch.optim.Optimizer | OptimWrapper, steps: int) -> np.ndarray:
    """Learning rates that the config's schedulers give.

    Args:
        steps: iterations of an epoch, or of the whole run where training is counted in iterations.

    Returns:
        (iterations, parameter groups).
    """
    schedulers = [
        PARAM_SCHEDULERS.build(scheduler, default_args=dict(optimizer=optimizer, epoch_length=steps))
        for scheduler in cfg.param_scheduler
    ]
    rates = []
    for iteration in range(1, 1 + steps * cfg.train_cfg.get("max_epochs", 1)):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer._global_step += 1  # what optimizer.step() would have counted
        for scheduler in schedulers:
            if not scheduler.by_epoch or iteration % steps == 0:
                scheduler.step()
    return np.array(rates)


def gpus_and_batch(path: Path) -> tuple[int, int]:
    """GPUs and images on each, as the config's name says."""
    gpus, batch = re.search(r"_(\d+)xb(\d+)-", path.stem).groups()
    return int(gpus), int(batch)


@contextmanager
def second_of_its_own() -> Iterator[None]:
    """A run starts in a second that no earlier one had, for MMEngine tells runs apart by it: one to come."""
    _LATEST[0] = start = max(int(time.time()), _LATEST[0] + 1)
    clock = SimpleNamespace(time=lambda: float(start), strftime=time.strftime, localtime=time.localtime)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("mmengine.runner.runner", "mmengine._strategy.base"):
            patch.setattr(f"{module}.time", clock)
        yield


_LATEST = [0]


def run_tool(monkeypatch: pytest.MonkeyPatch, tool: str, *words: object) -> None:
    """Run a tool of the repository, for example `train.py`, in this process: another takes 10 s to start."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(sys, "argv", [tool, *map(str, words)])
    with second_of_its_own():
        runpy.run_path(str(ROOT / "tools" / tool), run_name="__main__")
