"""Low-rank adapters (LoRA, arXiv 2106.09685): a weight that stays, plus a trained product of thin matrices.

Modules keep their names and forward passes: PyTorch computes the sum wherever `weight` is read. In a model's
state dict, and so in its checkpoints, the backbone has the sums under the weights' names, as if it had been
trained as a whole; what is summed stands beside it, below `adapters.`.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

# The paper's for RoBERTa base (its Table 9), which is as wide and as deep as ViT-B.
RANK = 8
ALPHA = 8
# The linear layers of an attention, here and in timm: queries, keys and values, joint or apart; the output.
PROJECTIONS = ("attn.qkv", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.proj")
ADAPTERS = "adapters."
SUMMED = ".parametrizations."  # in PyTorch's names of what is summed


class LowRankUpdate(nn.Module):
    """`W + alpha / rank * B A`, for `torch.nn.utils.parametrize`; at first B is zero, and W stays as it is.

    Args:
        weight: W, `(outputs, inputs)`.
    """

    def __init__(self, weight: Float[Tensor, "outputs inputs"]) -> None:
        super().__init__()
        num_outputs, num_inputs = weight.shape
        self.A = nn.Parameter(weight.new_empty(RANK, num_inputs))
        self.B = nn.Parameter(weight.new_zeros(num_outputs, RANK))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))  # as the authors' code

    def forward(self, weight: Float[Tensor, "outputs inputs"]) -> Float[Tensor, "outputs inputs"]:
        """The sum."""
        # Not rounded by autocast: the weight that is saved is then the one that was trained.
        with torch.autocast(weight.device.type, enabled=False):
            return weight + ALPHA / RANK * (self.B @ self.A)


def add_adapters(model: nn.Module) -> None:
    """Give each projection of the attentions in `model.backbone` an adapter, in place."""
    for name, module in model.backbone.named_modules():
        if name.endswith(PROJECTIONS) and isinstance(module, nn.Linear):
            parametrize.register_parametrization(module, "weight", LowRankUpdate(module.weight))
            module.register_load_state_dict_pre_hook(start_from_weight)
    model.register_state_dict_post_hook(show_sums)
    model.register_load_state_dict_pre_hook(take_adapters)


def show_sums(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """State dict hook: the sums under the weights' names, and what is summed below `adapters.`."""
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module, "weight"):
            state_dict[f"{prefix}{path}.weight"] = module.weight.detach()
    for name in [name for name in state_dict if SUMMED in name]:
        state_dict[prefix + ADAPTERS + name.removeprefix(prefix)] = state_dict.pop(name)


def take_adapters(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Loading hook: what is summed, from below `adapters.`."""
    for name in [name for name in state_dict if name.startswith(prefix + ADAPTERS)]:
        state_dict[prefix + name.removeprefix(prefix + ADAPTERS)] = state_dict.pop(name)


def start_from_weight(linear: nn.Linear, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Loading hook of a projection: a weight that comes without an adapter stays, and B begins at zero."""
    weight = state_dict.pop(f"{prefix}weight", None)
    summed = f"{prefix}parametrizations.weight."
    if weight is None or f"{summed}original" in state_dict:
        return
    update = linear.parametrizations.weight[0]
    state_dict[f"{summed}original"] = weight
    state_dict[f"{summed}0.A"] = update.A.detach()
    state_dict[f"{summed}0.B"] = torch.zeros_like(update.B)
