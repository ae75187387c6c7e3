"""`torch.compile` for the part of a model where the time goes."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner

from mapet_mm.registry import HOOKS


@HOOKS.register_module()
class CompileHook(Hook):
    """Compile the model's backbone, in place, before training.

    MMEngine's own `compile` wraps the whole train step, data preprocessing, logging and optimizer included,
    in which `torch.compile` breaks its graph dozens of times and recompiles for each learning rate. The
    backbone is one graph; `tools/train.py` puts this hook in where a config has `compile=True`.

    Args:
        fullgraph: refuse a backbone that cannot be one graph, instead of breaking it silently.
        dynamic: False compiles once for each batch size, with static shapes.
        **options: other arguments of `torch.compile` (`backend`, `mode`, `options`).
    """

    def __init__(self, fullgraph: bool = True, dynamic: bool | None = False, **options: Any) -> None:
        self.options = dict(fullgraph=fullgraph, dynamic=dynamic, **options)

    def before_train(self, runner: Runner) -> None:
        """Compile; the first iterations then take minutes."""
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        if not hasattr(model, "backbone"):
            raise ValueError(
                f"compile: model {type(model).__name__} has no `backbone` to compile; leave it out"
            )
        model.backbone.compile(**self.options)
        runner.logger.info("The backbone is compiled in the first iterations, which takes minutes.")
