"""Small pre-trainings with a context loss, or with an encoder of the visible patches."""

import torch

from mapet_mm.registry import MODELS

ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)
VOCAB = 11
VISIBLE = 7  # of 25 patches, besides the class token
NECK = dict(type="mapet_mm.CrossAttentionPredictor", embed_dims=24, num_layers=2, num_heads=3)


def build(objective, context_loss=0.5, cutting_point=1 + VISIBLE, backbone=None):
    """MaPeT with random weights, none of them small; "visible" is `VisibleMIM`.

    A backbone of another kind than the plain ViT comes with all its settings.
    """
    kind = dict(type="mapet_mm.MaPeT")
    if objective == "visible":
        kind = dict(type="mapet_mm.VisibleMIM", neck=NECK)
        objective = "context"
    plain = dict(type="mapet_mm.MaPeTPretrainViT", arch=ARCH, img_size=20, patch_size=4)
    plain.update(objective=objective, cutting_point=cutting_point)
    model = MODELS.build(
        dict(
            backbone=backbone or plain,
            head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=VOCAB),
            target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=VOCAB),
            context_loss=context_loss,
            **kind,
        )
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def batch():
    return [torch.randn(3, 3, 20, 20), torch.randint(VOCAB, (3, 5, 5))]
