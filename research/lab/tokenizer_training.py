"""Trainings of tokenizers on a small dataset's images: VQ-KD, a discrete autoencoder, a small CLIP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmengine.model import BaseModel
from mmpretrain.structures import DataSample
from torch import Tensor, nn
from torch.nn import functional as F

from mapet_mm.models.target_generators.kclip import STRIDE, set_stride
from mapet_mm.registry import MODELS

PHRASES = ("a photo of a", "a photo of the", "a picture of one", "a small photo of a")
PHRASES += ("a black and white photo of a", "a good photo of a", "a close-up of a", "this is a")
CAPTION_LENGTH = 16


@MODELS.register_module()
class VQKDDistillation(BaseModel):
    """VQ-KD as BEiT v2 trains it: the decoded codes learn to have the direction of the teacher's features.

    Its checkpoints are weights for `FrozenTokenizer`, with the prefix `tokenizer.`.

    Args:
        tokenizer: config of MMPretrain's `VQKD`.
        teacher: config of a `KCLIP` or `GridKMeans` without codebook, of the tokenizer's grid.
        grid: (H, W) tokens.
        **kwargs: as for MMEngine's `BaseModel`.
    """

    def __init__(
        self, tokenizer: Mapping[str, Any], teacher: Mapping[str, Any], grid: tuple[int, int], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.tokenizer, self.teacher = MODELS.build(tokenizer), MODELS.build(teacher)
        width, code_dim = self.tokenizer.encoder.embed_dims, self.tokenizer.quantize.codebook_dim
        self.position = nn.Parameter(torch.zeros(1, grid[0] * grid[1], width))
        options = dict(dropout=0, activation="gelu", batch_first=True, norm_first=True)
        layer = nn.TransformerEncoderLayer(width, 3, 4 * width, **options)
        self.decoder_in, self.decoder_out = nn.Linear(code_dim, width), nn.Linear(width, self.teacher.dim)
        self.decoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(
        self, inputs: list[Tensor], data_samples: list | None = None, mode: str = "tensor"
    ) -> dict[str, Tensor] | Tensor:
        """Losses of `inputs`, the tokenizer's view and the teacher's; or the tokens of the first view."""
        if mode != "loss":
            return self.tokenizer(inputs[0])
        codes, _, code_loss = self.tokenizer.encode(inputs[0])
        tokens = self.decoder_in(codes.flatten(2).transpose(1, 2)) + self.position  # B D H W -> B (H W) D
        decoded = self.decoder_out(self.decoder(tokens))
        distance = 1 - F.cosine_similarity(decoded, self.teacher.features(inputs[1]), dim=-1).mean()
        return {"loss_teacher": distance, "loss_codes": code_loss}


@MODELS.register_module()
class DiscreteAutoencoder(BaseModel):
    """MMPretrain's DALL-E encoder trained on pixels: a discrete variational autoencoder (Ramesh et al. 2021).

    Tokens are drawn by Gumbel-softmax and decoded to the image, with a smaller decoder and a simpler loss
    (squared differences) than theirs. Checkpoints are weights for `FrozenTokenizer`, prefix `tokenizer.`.

    Args:
        tokenizer: config of MMPretrain's `DALL-E`.
        **kwargs: as for MMEngine's `BaseModel`.
    """

    def __init__(self, tokenizer: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tokenizer, self.vocab_size = MODELS.build(tokenizer), tokenizer["vocab_size"]
        self.tokenizer.requires_grad_(True)
        layers: list[nn.Module] = [nn.Conv2d(self.vocab_size, 256, 1)]
        for width in (256, 128, 64):  # the encoder halves the image three times
            layers += [nn.ReLU(), nn.ConvTranspose2d(width, width // 2, 4, stride=2, padding=1)]
        self.decoder = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1))

    def forward(
        self, inputs: Tensor, data_samples: list | None = None, mode: str = "tensor"
    ) -> dict[str, Tensor] | Tensor:
        """Losses of images (B, 3, H, W), or the logits of their tokens (B, V, H, W)."""
        logits = self.tokenizer(inputs)
        if mode != "loss":
            return logits
        drawn = F.gumbel_softmax(logits, dim=1)
        shares = logits.softmax(1).mean((0, 2, 3))
        # A small loss that favours an even use of the vocabulary.
        uneven = (shares * (shares * self.vocab_size).clamp_min(1e-9).log()).sum()
        return {"loss_pixels": F.mse_loss(self.decoder(drawn), inputs), "loss_spread": 0.01 * uneven}


@MODELS.register_module()
class CaptionCLIP(BaseModel):
    """open_clip's CLIP with a ResNet tower; its checkpoints are weights for `KCLIP`.

    A caption is a template, drawn anew each time, with the name of the image's class in it, so the CLIP
    learns from labels. Images are classified by the mean of each class's captions. A process contrasts its
    own images alone.

    Args:
        vision: the image tower: `layers` (four numbers of blocks), `width`.
        text: the text tower: `layers`, `width`, `heads`.
        embed_dims: dimension of both towers' embeddings.
        image_size: side of the images in pixels.
        class_names: names of the classes by label, as they stand in captions.
        stride: of the image tower (see `set_stride`).
        **kwargs: as for MMEngine's `BaseModel`.
    """

    def __init__(
        self,
        vision: Mapping[str, Any],
        text: Mapping[str, Any],
        embed_dims: int,
        image_size: int,
        class_names: Sequence[str],
        stride: int = STRIDE,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        import open_clip
        from open_clip.loss import ClipLoss

        # Attention pooling is made for an image_size at stride 32.
        vision = dict(vision, image_size=image_size * STRIDE // stride)
        self.clip = open_clip.CLIP(embed_dims, vision, dict(text, context_length=CAPTION_LENGTH))
        set_stride(self.clip.visual, stride)
        self.contrast = ClipLoss()
        captions = [f"{noun} {name}." for name in class_names for noun in PHRASES]
        captions = open_clip.get_tokenizer("RN50")(captions, context_length=CAPTION_LENGTH)
        self.register_buffer("captions", captions.unflatten(0, (-1, len(PHRASES))), persistent=False)

    def forward(
        self, inputs: Tensor, data_samples: list[DataSample] | None = None, mode: str = "tensor"
    ) -> Tensor | dict[str, Tensor] | list[DataSample]:
        """Losses, predictions (zero-shot), or the images' embeddings (B, D), normalised."""
        images = self.clip.encode_image(inputs, normalize=True)
        if mode == "tensor":
            return images
        if mode == "loss":
            self.clip.logit_scale.data.clamp_(0, math.log(100))
            labels = torch.cat([sample.gt_label for sample in data_samples])
            drawn = torch.randint(self.captions.shape[1], labels.shape, device=labels.device)
            texts = self.clip.encode_text(self.captions[labels, drawn], normalize=True)
            return {"loss": self.contrast(images, texts, self.clip.logit_scale.exp())}
        texts = self.clip.encode_text(self.captions.flatten(0, 1), normalize=True)
        classes = F.normalize(texts.unflatten(0, self.captions.shape[:2]).mean(1), dim=1)
        scores = (self.clip.logit_scale.exp() * images @ classes.T).softmax(dim=1)
        return [
            sample.set_pred_score(score).set_pred_label(score.argmax())
            for sample, score in zip(data_samples, scores, strict=True)
        ]
