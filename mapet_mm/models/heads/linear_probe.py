"""Linear probes: a backbone that stays as it is, and linear classifiers of its layers' features."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from jaxtyping import Float
from mmpretrain.models.classifiers import ImageClassifier
from mmpretrain.models.heads import ClsHead
from mmpretrain.structures import DataSample
from torch import Tensor, nn

from mapet_mm.registry import MODELS


@MODELS.register_module()
class LinearProbe(ImageClassifier):
    """MMPretrain's `ImageClassifier` on any backbone, frozen.

    The backbone has no gradient and stays in evaluation mode, including its stochastic depth and batch
    statistics, even when a runner sets the model to training mode. Arguments are as for `ImageClassifier`.

    Raises:
        ValueError: the head is a `LayerwiseLinearHead`, and the backbone normalises its last layer's tokens,
            or has not just a class token before the patches.

    Examples:
        >>> backbone = dict(type="mapet_mm.MaPeTViT", arch="deit-tiny", img_size=32)
        >>> head = dict(type="mmpretrain.LinearClsHead", num_classes=10, in_channels=192)
        >>> probe = LinearProbe(backbone=backbone, head=head).train()
        >>> probe.backbone.training
        False
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.backbone.requires_grad_(False)
        if isinstance(self.head, LayerwiseLinearHead):
            if getattr(self.backbone, "final_norm", False):
                raise ValueError("the backbone has a final norm: set its `final_norm=False`")
            if getattr(self.backbone, "num_extra_tokens", 1) != 1:
                raise ValueError("the probe takes a class token and patches, and the backbone has others")

    def train(self, mode: bool = True) -> "LinearProbe":
        """Set the mode of neck and head; the backbone's stays evaluation."""
        super().train(mode)
        self.backbone.eval()
        return self


@MODELS.register_module()
class LayerwiseLinearHead(ClsHead):
    """One linear classifier per layer of a ViT, trained together on one forward pass: BEiT's linear probe.

    As in BEiT's `run_linear_eval.py`, a layer's features are its class token and the mean of its patch
    tokens, side by side, without a norm. Weights start normal with standard deviation 0.01, biases at 0. The
    losses are summed, all in float32; the classifiers share nothing, so each learns as if it were alone.

    The backbone needs `out_type="raw"`, `final_norm=False` and all layers in `out_indices`. `LinearProbe`
    freezes it.

    Args:
        num_classes: number of classes.
        in_channels: width of the backbone, `D`.
        layers: number of layers.
        inference_layer: the layer, from 1, that classifies in `forward` and in `pred_score`; by default the
            last.
        **kwargs: as for MMPretrain's `ClsHead`: `loss`, `init_cfg`, ...

    Raises:
        ValueError: an inference layer that is not probed, or features of another number of layers.

    Examples:
        >>> head = LayerwiseLinearHead(num_classes=10, in_channels=192, layers=2)
        >>> tokens = torch.randn(3, 5, 192)  # of 4 patches and the class token
        >>> [logits.shape for logits in head.layer_logits([tokens, tokens])]
        [torch.Size([3, 10]), torch.Size([3, 10])]
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        layers: int = 12,
        inference_layer: int | None = None,
        **kwargs,
    ) -> None:
        super().__init__(**{"loss": dict(type="CrossEntropyLoss"), **kwargs})
        self.layers = list(range(1, layers + 1))
        self.inference_layer = self.layers[-1] if inference_layer is None else inference_layer
        self._inference_index = self.layers.index(self.inference_layer)
        self.num_classes = num_classes
        self.in_channels = in_channels
        # One classifier for each layer, all from the same start.
        classifier = nn.Linear(2 * in_channels, num_classes)
        nn.init.normal_(classifier.weight, std=0.01)
        nn.init.zeros_(classifier.bias)
        self.classifiers = nn.ModuleList(deepcopy(classifier) for _ in self.layers)

    def pre_logits(self, feats: Sequence[Tensor]) -> Float[Tensor, "batch dim"]:
        """Features of the inference layer, `(B, 2 D)`."""
        return pool(feats[self._inference_index])

    def forward(self, feats: Sequence[Tensor]) -> Float[Tensor, "batch class"]:
        """Logits of the inference layer, `(B, C)`, of all layers' tokens, `(B, N, D)` each."""
        return self.layer_logits(feats)[self._inference_index]

    def layer_logits(self, feats: Sequence[Tensor]) -> list[Float[Tensor, "batch class"]]:
        """Logits of each layer, `(B, C)` each, of all layers' tokens, `(B, N, D)` each."""
        if len(feats) != len(self.layers):
            raise ValueError(f"features of {len(feats)} layers, not {len(self.layers)}: set `out_indices`")
        logits = []
        with torch.autocast(feats[0].device.type, enabled=False):
            for classifier, tokens in zip(self.classifiers, feats, strict=True):
                logits.append(classifier(pool(tokens)))
        return logits

    def loss(
        self, feats: Sequence[Tensor], data_samples: list[DataSample], **kwargs
    ) -> dict[str, Float[Tensor, ""]]:
        """The layers' losses, summed."""
        losses = [self._get_loss(logits, data_samples, **kwargs) for logits in self.layer_logits(feats)]
        return {"loss": sum(each["loss"] for each in losses)}

    def predict(
        self, feats: Sequence[Tensor], data_samples: list[DataSample] | None = None
    ) -> list[DataSample]:
        """Classify: `layer_labels`, a class by each layer's number, beside `pred_score` and `pred_label`."""
        logits = self.layer_logits(feats)
        data_samples = self._get_predictions(logits[self._inference_index], data_samples)
        labels = torch.stack([each.argmax(1) for each in logits], dim=1).tolist()  # B L
        for sample, row in zip(data_samples, labels, strict=True):
            sample.set_field(dict(zip(self.layers, row, strict=True)), "layer_labels")
        return data_samples


def pool(tokens: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch two_dims"]:
    """The class token and the mean of the patch tokens, side by side, in float32."""
    return torch.cat([tokens[:, 0].float(), tokens[:, 1:].float().mean(1)], dim=1)
