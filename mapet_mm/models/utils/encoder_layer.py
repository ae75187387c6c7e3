"""MMPretrain's Transformer layer, initialised as its backbone says and checkpointed on request."""

import torch
from jaxtyping import Float
from mmcv.cnn.bricks import DropPath
from mmpretrain.models.backbones.vision_transformer import TransformerEncoderLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class EncoderLayer(TransformerEncoderLayer):
    """MMPretrain's layer; its parameters and their names stay.

    MMPretrain's backbone builds its own class only, so `MaPeTViT` gives its layers this one afterwards.
    """

    with_cp = False  # keep only the input for the backward pass and run the layer again there

    def init_weights(self) -> None:
        """Apply the layer's own `init_cfg`; MMPretrain's would draw the MLP anew, over the backbone's."""
        super(TransformerEncoderLayer, self).init_weights()

    def forward(self, tokens: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        """The layer's output `(B, N, D)`, all tokens seeing each other."""
        if self.with_cp and torch.is_grad_enabled():
            return checkpoint(super().forward, tokens, use_reentrant=False)
        return super().forward(tokens)


def take_over(layer: nn.Module, layer_type: type[nn.Module], with_cp: bool) -> None:
    """Make a layer that a library's backbone has built one of our class; parameters and names stay."""
    layer.__class__ = layer_type
    layer.with_cp = with_cp
    for module in layer.modules():
        if isinstance(module, DropPath):  # with a NumPy scalar, on which torch.compile breaks its graph
            module.drop_prob = float(module.drop_prob)
