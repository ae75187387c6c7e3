"""A warning where a head is told strides that its feature maps do not have, which runs and learns badly."""

from collections.abc import Iterable, Sequence
from math import ceil, lcm

import torch
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.runner import Runner
from torch import nn

from mapet_mm.engine.model_parts import unwrapped
from mapet_mm.evaluation.image_features import undisturbed
from mapet_mm.registry import HOOKS

SIDE = 256  # of the image that is sent through, in pixels, or a little more


@HOOKS.register_module()
class StrideCheckHook(Hook):
    """Warn, before training starts, of heads whose configured strides differ from those of their maps.

    All maps of a plain ViT have one stride, that of its patches, and an `FPN` does not change that.
    """

    def before_train(self, runner: Runner) -> None:
        """Say it once, in the log."""
        for line in wrong_strides(unwrapped(runner.model)):
            MMLogger.get_current_instance().warning(f"warning: {line}")


def wrong_strides(model: nn.Module) -> list[str]:
    """A line for each head, or extractor of regions, that is told strides which its maps do not have.

    Args:
        model: a segmentor or detector; its `extract_feat(images)` gives the maps that its heads get.
    """
    told = {name: strides for name, module in model.named_modules() if (strides := _told_strides(module))}
    if not told:
        return []
    device = next(model.parameters()).device
    side = _side(stride for strides in told.values() for stride in strides)
    with undisturbed(model):
        maps = model.extract_feat(torch.zeros(1, 3, side, side, device=device))
    actual = [round(side / one.shape[-1], 1) for one in maps]
    lines = []
    for name, strides in told.items():
        taken = getattr(model.get_submodule(name), "in_index", range(len(strides)))
        found = [actual[i] for i in taken]
        if found != strides:
            lines.append(
                f"`{name}` is told maps of strides {_listed(strides)}, but they have {_listed(found)}: put "
                "`mapet_mm.SimpleFeaturePyramid` behind the backbone, or tell it the strides there are"
            )
    return lines


def _side(strides: Iterable[float]) -> int:
    """A side that all of the strides divide, so that maps which have them are not padded."""
    step = lcm(*(round(2 * stride) for stride in strides))  # of patches of 14 pixels the finest is 3.5
    return ceil(SIDE / step) * step if step <= 4 * SIDE else SIDE


def _told_strides(module: nn.Module) -> list[float]:
    """What a head of MMSegmentation or MMDetection is told of its maps; nothing if it is not told."""
    generator = getattr(module, "prior_generator", None)
    for owner, name in ((module, "feature_strides"), (module, "featmap_strides"), (generator, "strides")):
        if strides := getattr(owner, name, None):
            return [stride[0] if isinstance(stride, Sequence) else stride for stride in strides]
    return []


def _listed(strides: Sequence[float]) -> str:
    return ", ".join(f"{stride:g}" for stride in strides)
