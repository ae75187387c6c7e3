"""`torch.compile` for the part of a model where the time goes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn
from torch._functorch import config as functorch_config

from mapet_mm.registry import HOOKS
from mapet_mm.utils.dist import unwrapped


@HOOKS.register_module()
class CompileHook(Hook):
    """Compile the model's backbone, in place, before training.

    MMEngine's own `compile` wraps the whole train step, in which `torch.compile` breaks its graph dozens of
    times and recompiles for each learning rate. The backbone is one graph. `mapet-mm train` adds this hook if
    a config has `compile=True`. Only training is compiled: validation batches have many shapes, each would
    be compiled for minutes, and PyTorch stops at eight; after the first step, other shapes than its own run
    eagerly in training, too, such as a smaller last batch. In several processes PyTorch cuts the graph where
    gradients are gathered, so that they travel while others are computed.

    Args:
        memory_budget: of what the compiler would keep for the backward pass, the share that it may keep; the
            rest, the cheapest, is computed again. Applies to everything that the process compiles.
        **options: arguments of `torch.compile`, such as `mode="reduce-overhead"` for CUDA graphs; by default
            `fullgraph=True`, which refuses a backbone that is not one graph, and `dynamic=False` (None for
            training with many image sizes, which are then compiled as they come).
    """

    def __init__(self, memory_budget: float = 0.9, **options: Any) -> None:
        self.memory_budget = memory_budget
        self.options = dict(fullgraph=True, dynamic=False) | options
        self._eager = ExitStack()
        self._compiled = ExitStack()  # holds what is set for the rest of the training
        self._is_first_step = True

    def before_val(self, runner: Runner) -> None:
        """Suspend compilation."""
        self._eager.enter_context(torch.compiler.set_stance("force_eager"))

    def after_val(self, runner: Runner) -> None:
        """Go back to what is compiled."""
        self._eager.close()

    def before_train(self, runner: Runner) -> None:
        """Compile; the first iterations then take minutes."""
        self._is_first_step = True
        torch.compiler.set_stance("default")  # whatever a training left that was interrupted
        self.compile(unwrapped(runner.model))
        runner.logger.info("The backbone is compiled in the first iterations, which takes minutes.")

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """After the first step, compile no other shape."""
        if self._is_first_step and self.options["dynamic"] is False:
            self._compiled.enter_context(torch.compiler.set_stance("eager_on_recompile"))
        self._is_first_step = False

    def after_train(self, runner: Runner) -> None:
        """Let the process compile again."""
        self._compiled.close()

    def compile(self, model: nn.Module) -> None:
        """Have the backbone of `model` compiled when it is first called."""
        if not hasattr(model, "backbone"):
            raise ValueError(f"compile: {type(model).__name__} has no `backbone` to compile; leave it out")
        functorch_config.activation_memory_budget = self.memory_budget
        model.backbone.compile(**self.options)
