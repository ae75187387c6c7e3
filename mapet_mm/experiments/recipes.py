"""What a recipe says of its run: the tool, what is written last, the processes, the weights left open."""

from __future__ import annotations

from mmengine.config import Config

from mapet_mm.experiments.table import DeclarationError
from mapet_mm.utils.config import nodes

TRAIN = "tools/train.py"
EVALUATE = "tools/evaluate_features.py"  # for a config with a section `evaluation` instead of a training
RESULTS, FEATURES = "results.json", "features"  # figures and cache of an evaluation
SECTION = "evaluation"


def tool_of(cfg: Config) -> tuple[tuple[str, ...], str]:
    """The tool of a config with its arguments, and the name of its result: an evaluation or a training."""
    if SECTION in cfg and not cfg.get("train_cfg"):
        return (EVALUATE, cfg.filename, "--out", "{run}", "--cache", f"{{run}}/{FEATURES}"), RESULTS
    return (TRAIN, cfg.filename, "--work-dir", "{run}", "--resume"), final_checkpoint(cfg)


def final_checkpoint(cfg: Config) -> str:
    """Name of the checkpoint that a training with this config writes last."""
    loop = cfg.get("train_cfg") or {}
    for key, name in (("max_epochs", "epoch"), ("max_iters", "iter")):
        if key in loop:
            return f"{name}_{loop[key]}.pth"
    raise DeclarationError(f"`{cfg.filename}` has no `train_cfg` that says how long: it cannot be trained")


def processes_of(cfg: Config) -> int:
    """Number of processes that gives the total batch size of the learning rate, 1 if not given."""
    meant = (cfg.get("auto_scale_lr") or {}).get("base_batch_size", 0)
    batch = (cfg.get("train_dataloader") or {}).get("batch_size", 1)
    batch *= (cfg.get("optim_wrapper") or {}).get("accumulative_counts", 1)
    return max(1, meant // batch)


def open_starts(cfg: Config) -> list[str]:
    """Keys of the `init_cfg` entries in the model that need a checkpoint."""
    dicts = [(key, node) for key, node in nodes(cfg.get("model"), "model") if isinstance(node, dict)]
    return [key for key, node in dicts if "checkpoint" in node and not node["checkpoint"]]
