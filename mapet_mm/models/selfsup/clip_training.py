"""A small CLIP, open_clip's own model and loss, trained on captions that are made of class names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from mmengine.dist import get_dist_info
from mmengine.model import BaseModel
from mmpretrain.structures import DataSample
from torch import Tensor

from mapet_mm.models.target_generators.clip_tower import STRIDE, set_stride
from mapet_mm.registry import MODELS

TEMPLATES = (
    "a photo of a {}.",
    "a photo of the {}.",
    "a picture of one {}.",
    "a small photo of a {}.",
    "a black and white photo of a {}.",
    "a good photo of a {}.",
    "a close-up of a {}.",
    "this is a {}.",
)
CAPTION_LENGTH = 16
LARGEST_SCALE = math.log(100)  # CLIP's


@MODELS.register_module()
class CaptionCLIP(BaseModel):
    """open_clip's CLIP with a ResNet tower; its checkpoints are weights for `KCLIP`.

    A caption is a template, drawn anew each time, with the name of the image's class in it, so the CLIP
    learns from labels. To show progress, images are classified by the mean of the captions (zero-shot).

    Args:
        vision: the image tower: `layers` (four numbers of blocks), `width`.
        text: the text tower: `layers`, `width`, `heads`.
        embed_dims: dimension of both towers' embeddings.
        image_size: side of the images in pixels.
        class_names: names of the classes by label, as they stand in captions.
        templates: captions, with braces in place of the name.
        stride: of the image tower (see `set_stride`).
        data_preprocessor: MMPretrain's for classification.
        init_cfg: as for any model of MMEngine.
    """

    def __init__(
        self,
        vision: Mapping[str, Any],
        text: Mapping[str, Any],
        embed_dims: int,
        image_size: int,
        class_names: Sequence[str],
        templates: Sequence[str] = TEMPLATES,
        stride: int = STRIDE,
        data_preprocessor: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        import open_clip
        from open_clip.loss import ClipLoss

        # Attention pooling is made for an image_size at stride 32.
        vision = dict(vision, image_size=image_size * STRIDE // stride)
        self.clip = open_clip.CLIP(embed_dims, vision, dict(text, context_length=CAPTION_LENGTH))
        set_stride(self.clip.visual, stride)
        rank, world_size = get_dist_info()
        self.contrast = ClipLoss(gather_with_grad=True, rank=rank, world_size=world_size)
        captions = [template.format(name) for name in class_names for template in templates]
        captions = open_clip.get_tokenizer("RN50")(captions, context_length=CAPTION_LENGTH)
        captions = captions.reshape(len(class_names), len(templates), CAPTION_LENGTH)
        self.register_buffer("captions", captions, persistent=False)

    def forward(
        self,
        inputs: Float[Tensor, "batch 3 height width"],
        data_samples: list[DataSample] | None = None,
        mode: str = "tensor",
    ) -> Tensor | dict[str, Tensor] | list[DataSample]:
        """Losses, predictions, or the images' embeddings (B, D), normalised."""
        images = self.clip.encode_image(inputs, normalize=True)
        if mode == "loss":
            return self._loss(images, torch.cat([sample.gt_label for sample in data_samples]))
        if mode == "tensor":
            return images
        scores = (self.clip.logit_scale.exp() * images @ self._class_embeddings().T).softmax(dim=1)
        samples = data_samples or [DataSample() for _ in images]
        return [
            sample.set_pred_score(score).set_pred_label(score.argmax())
            for sample, score in zip(samples, scores, strict=True)
        ]

    def _loss(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.clip.logit_scale.data.clamp_(0, LARGEST_SCALE)
        drawn = torch.randint(self.captions.shape[1], labels.shape, device=labels.device)
        texts = self.clip.encode_text(self.captions[labels, drawn], normalize=True)
        return {"loss": self.contrast(images, texts, self.clip.logit_scale.exp())}

    def _class_embeddings(self) -> Float[Tensor, "kind dim"]:
        texts = self.clip.encode_text(self.captions.flatten(0, 1), normalize=True)
        return torch.nn.functional.normalize(texts.unflatten(0, self.captions.shape[:2]).mean(1), dim=1)
