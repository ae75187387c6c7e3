"""LayerScale that only the backbone or only the checkpoint has: what keeps the outputs the same."""

import re

from mmengine.logging import print_log
from torch import Tensor, nn

from mapet_mm.interop.names import LAYER_SCALES as SCALED
from mapet_mm.interop.names import fold_layer_scale
from mapet_mm.models.utils.beit_names import LAYER_SCALES

SCALE = re.compile(rf"(layers\.\d+\.)({'|'.join(map(re.escape, [*LAYER_SCALES, *LAYER_SCALES.values()]))})")


def fill_layer_scales(vit: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """State dict hook: give ones to each LayerScale of a backbone whose layer is there without any.

    Otherwise the layer would keep its initial scale and give other features than the checkpoint's network.

    Args:
        vit: a ViT with the layers of MMPretrain's plain ViT or of its BEiT.
        state_dict: the state dict, changed in place.
        prefix: what the backbone's names start with in it.
    """
    scaled = {name[: found.end(1)] for name in state_dict if (found := SCALE.search(name))}
    filled = []
    for name, parameter in vit.named_parameters():
        found = SCALE.fullmatch(name)
        if found is None or prefix + found[1] in scaled:
            continue
        if (projection := state_dict.get(f"{prefix}{found[1]}attn.proj.weight")) is not None:
            state_dict[prefix + name] = projection.new_ones(parameter.shape)
            filled.append(name)
    if filled:
        print_log(
            f"Filled {len(filled)} LayerScales (`{prefix}{filled[0]}`, ...) with one: the checkpoint has "
            "none, and outputs stay the same.",
            logger="current",
        )


def fold_layer_scales(vit: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """State dict hook: multiply each LayerScale that the backbone lacks into the linear layer before it.

    Otherwise it would be dropped, and the layer would give other features than the checkpoint's network.

    Args:
        vit: a ViT with the layers of MMPretrain's plain ViT.
        state_dict: the state dict, changed in place; its tensors are not.
        prefix: what the backbone's names start with in it.
    """
    own = {f"{prefix}{name}" for name, _ in vit.named_parameters()}
    folded = []
    for scale in [name for name in state_dict if name.endswith(tuple(SCALED)) and name not in own]:
        linear = next(scale.removesuffix(end) + SCALED[end] for end in SCALED if scale.endswith(end))
        names = (scale, f"{linear}.weight", f"{linear}.bias")
        if own.issuperset(names[1:]) and state_dict.keys() >= set(names):
            state_dict.update(fold_layer_scale({name: state_dict[name] for name in names}))
            del state_dict[scale]
            folded.append(scale)
    if folded:
        print_log(
            f"Folded {len(folded)} LayerScales (`{folded[0]}`, ...) into the layers before them: the "
            "backbone has none, and outputs stay the same.",
            logger="current",
        )
