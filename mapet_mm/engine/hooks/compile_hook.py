"""`torch.compile` for the part of a model where the time goes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

from mapet_mm.engine.hooks.total_batch_hook import accumulated
from mapet_mm.registry import HOOKS
from mapet_mm.utils.dist import unwrapped
from mapet_mm.utils.errors import reason_of

# Steps of a training that is long enough: on one H200 compiling takes 46 s and saves 17 to 23 ms a step.
WORTHWHILE_STEPS = 5000


@HOOKS.register_module()
class CompileHook(Hook):
    """Compile the model's backbone, in place, before training.

    MMEngine's own `compile` wraps the whole train step, in which `torch.compile` breaks its graph dozens of
    times and recompiles for each learning rate. The backbone is one graph; losses and norms are computed
    outside of it, so the log may keep them while CUDA graphs run again. The ImageNet recipes list this hook
    with `where_it_pays=True`, and `mapet-mm train` adds it if a config has `compile=True`.

    Only training is compiled: validation batches have many shapes, each would be compiled for minutes, and
    PyTorch stops at eight. In training, batches smaller than the loader's run eagerly, such as an epoch's
    last one, and after the first step so do all shapes but its own. In several processes PyTorch cuts the
    graph where gradients are gathered, so that they travel while others are computed.

    Args:
        where_it_pays: leave the backbone as it is, and say why, where there is no GPU, where PyTorch cannot
            compile for it (Triton or a C compiler is missing, it is too old), and in trainings of fewer than
            5,000 steps. A backbone that is not one graph is compiled in parts, and what cannot be compiled
            runs eagerly.
        memory_budget: of what the compiler would keep for the backward pass, the share that it may keep; the
            rest, the cheapest, is computed again. Applies to everything that the process compiles.
        **options: arguments of `torch.compile`, such as `mode="reduce-overhead"` for CUDA graphs (not taken
            where batches are accumulated, whose gradients they would overwrite); by default `fullgraph=True`,
            which refuses a backbone that is not one graph, and `dynamic=False` (None for training with many
            image sizes, which are then compiled as they come).
    """

    def __init__(self, where_it_pays: bool = False, memory_budget: float = 0.9, **options: Any) -> None:
        self.where_it_pays = where_it_pays
        self.memory_budget = memory_budget
        self.options = dict(fullgraph=not where_it_pays, dynamic=False) | options
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
        model = unwrapped(runner.model)
        if self.where_it_pays:
            why_not = why_not_worthwhile(model, runner.max_iters)
            if why_not:
                runner.logger.info(f"The backbone is not compiled: {why_not}.")
                return
            self._compiled.enter_context(dynamo_config.patch(suppress_errors=True))
        if "mode" in self.options and accumulated(runner.cfg) > 1:
            del self.options["mode"]
            runner.logger.info("CUDA graphs would overwrite gradients that are accumulated: not taken.")
        self.compile(model)
        runner.logger.info("The backbone is compiled in the first iterations, which takes minutes.")

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Run a smaller batch eagerly: also the first one of a training that goes on there."""
        if "mode" in self.options:
            torch.compiler.cudagraph_mark_step_begin()  # what the last step's graphs gave is used up
        if is_smaller(data_batch, runner.train_dataloader.batch_size):
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """After the first step of a whole batch, compile no other shape."""
        self._eager.close()
        if is_smaller(data_batch, runner.train_dataloader.batch_size):
            return
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
        for module in model.backbone.modules():
            if isinstance(getattr(module, "drop_prob", None), np.floating):
                module.drop_prob = float(module.drop_prob)  # on NumPy's numbers PyTorch breaks its graph
        functorch_config.activation_memory_budget = self.memory_budget
        model.backbone.compile(**self.options)


def is_smaller(data_batch: Any, batch_size: int | None) -> bool:
    """True if a batch has fewer images than the loader's; a batch sampler of one's own has no size."""
    samples = data_batch.get("data_samples") if isinstance(data_batch, Mapping) else None
    return bool(samples) and batch_size is not None and len(samples) < batch_size


def why_not_worthwhile(model: nn.Module, num_steps: int) -> str | None:
    """Why a model's backbone is not compiled for so many steps; None if it is.

    Whether PyTorch can compile for the GPU is found out with a small function: it takes a recent GPU, Triton,
    a C compiler and Python's headers.
    """
    if not hasattr(model, "backbone"):
        return f"{type(model).__name__} has none"
    if not torch.cuda.is_available():
        return "there is no GPU"
    if num_steps < WORTHWHILE_STEPS:
        return f"that takes longer than it saves in {num_steps:,} steps (`compile=True` does it all the same)"
    try:
        compiled_sum()
    except Exception as error:  # of PyTorch, Triton or a C compiler
        return f"PyTorch cannot compile for this GPU ({reason_of(error)})"
    return None


def compiled_sum() -> None:
    """Compute something small on the GPU by a compiled function."""
    torch.compile(lambda x: x + x)(torch.ones(8, device="cuda"))
