"""Tokenizers of other libraries, MMPretrain's VQ-KD and DALL-E among them, frozen and checked."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int64
from mmengine.config import ConfigDict
from mmengine.dist import barrier, is_main_process
from mmengine.model import BaseModule
from torch import Tensor, nn

from mapet_mm.errors import UserError
from mapet_mm.models.targets import token_ids
from mapet_mm.registry import MODELS
from mapet_mm.tokenizers.kclip import full_float32

# Running statistics that decide no token.
STATISTICS = ("cluster_size",)
OPTION = "init_cfg.checkpoint"


class TokenizerError(UserError, ValueError):
    """A tokenizer whose weights cannot be had or do not fit; the message is one line."""


@MODELS.register_module()
class FrozenTokenizer(BaseModule):
    """Target generator: any module that maps images to token ids or to logits over a vocabulary.

    Always in evaluation mode (MMPretrain's VQ-KD would go on learning its codebook in training), in true
    float32, without gradient, and no submodule of the model that it gives targets to, so that checkpoints,
    optimizer and gradient buckets have none of it.

    Args:
        tokenizer: its config, for example `dict(type="VQKD", ..., init_cfg=dict(type="Pretrained",
            checkpoint=<address or file>))`. The checkpoint has to have every weight of it; more is ignored.
        image_size: side of the input images in pixels.
        vocab_size: number of token ids.
        random_seed: instead of a checkpoint, fixed random weights drawn from this seed.

    Raises:
        TokenizerError: neither checkpoint nor seed, a checkpoint that cannot be had or lacks weights, or a
            VQ-KD whose codebook is not initialised.
    """

    def __init__(
        self,
        tokenizer: Mapping[str, Any],
        image_size: int,
        vocab_size: int,
        random_seed: int | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.image_size, self.vocab_size = image_size, vocab_size
        config = ConfigDict(tokenizer).to_dict()
        pretrained = config.pop("init_cfg", None) or {}
        self.description = {"tokenizer": config, "image_size": image_size, "vocab_size": vocab_size}
        if pretrained.get("type") == "Pretrained":
            model = MODELS.build(config)
            _load(model, pretrained["checkpoint"], pretrained.get("prefix", ""))
        elif random_seed is not None:
            model = _random(config, random_seed)
        else:
            raise TokenizerError(
                f"tokenizer {config['type']} has no weights: give it init_cfg=dict(type='Pretrained', "
                "checkpoint=<address or file>), or random_seed=<int> for fixed random weights"
            )
        _check_initialised(model)
        # In a tuple, out of nn.Module's sight.
        self._model = (model.float().eval().requires_grad_(False),)
        self.eval()

    @property
    def model(self) -> nn.Module:
        """The tokenizer itself."""
        return self._model[0]

    @cached_property
    def grid(self) -> tuple[int, int]:
        """(H, W) tokens of an image of `image_size`; the grid is square."""
        device = next(self.model.parameters()).device
        tokens = self(torch.zeros(1, 3, self.image_size, self.image_size, device=device))
        side = round(tokens.shape[1] ** 0.5)
        if side * side != tokens.shape[1]:
            raise TokenizerError(f"the tokenizer gives {tokens.shape[1]} tokens an image: no square grid")
        return side, side

    @cached_property
    def digest(self) -> str:
        """Identity of this tokenizer: SHA-256 of its configuration and of the weights that decide tokens."""
        sha = hashlib.sha256(json.dumps(self.description, sort_keys=True, default=str).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            if not name.endswith(STATISTICS):
                sha.update(f"{name}{tuple(tensor.shape)}".encode())
                sha.update(tensor.detach().cpu().contiguous().numpy())
        return sha.hexdigest()

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Int64[Tensor, "batch grid"]:
        """Token ids (B, HW), int64, in raster order, of normalised images (B, 3, H, W).

        Raises:
            ValueError: images of another size, or ids outside the vocabulary.
        """
        if images.shape[-2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"the tokenizer takes images of {self.image_size} x {self.image_size} px, got "
                f"{images.shape[-2]} x {images.shape[-1]}: resize in the pipeline or set `image_size`"
            )
        with full_float32(images.device):
            tokens = token_ids(self.model(images.float()))
        if (highest := int(tokens.max())) >= self.vocab_size:
            raise ValueError(
                f"the tokenizer gives token id {highest}, but `vocab_size` is {self.vocab_size}: set it to "
                "the size of the tokenizer's codebook"
            )
        return tokens

    def train(self, mode: bool = True) -> FrozenTokenizer:
        """Stay in evaluation mode whatever is asked."""
        return super().train(False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenTokenizer:
        # What .to(), .cuda() and .half() call: the tokenizer follows the model without being part of it.
        self.model._apply(fn, recurse)
        return super()._apply(fn, recurse)


def _random(config: Mapping[str, Any], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS.build(config)


def _load(model: nn.Module, checkpoint: str, prefix: str) -> None:
    """Load every weight of the tokenizer; MMEngine's loading would leave missing ones random."""
    weights = _read(checkpoint)
    weights = {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}
    expected = model.state_dict()
    missing = [name for name in expected if name not in weights and not name.endswith(STATISTICS)]
    shapes = [name for name in expected if name in weights and weights[name].shape != expected[name].shape]
    for problem, names in (("lacks", missing), ("has other shapes for", shapes)):
        if names:
            raise TokenizerError(
                f"checkpoint `{checkpoint}` {problem} {len(names)} of the tokenizer's {len(expected)} "
                f"tensors, `{names[0]}` first: it belongs to another architecture; correct the "
                f"tokenizer's config or `{OPTION}`"
            )
    model.load_state_dict({name: weights[name] for name in expected if name in weights}, strict=False)


def _read(checkpoint: str) -> dict[str, Tensor]:
    """The state dict of a file or an address; only tensors are unpickled."""
    remedy = f"give a local file by `{OPTION}`, or correct it"
    if not checkpoint:
        raise TokenizerError(f"the tokenizer's `{OPTION}` is empty: {remedy}")
    if "://" not in checkpoint and not os.path.isfile(checkpoint):
        raise TokenizerError(f"the tokenizer's weights `{checkpoint}` do not exist: {remedy}")
    try:
        if "://" in checkpoint:
            content = _download(checkpoint)
        else:
            content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the network or the file raises, the remedy is the same
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:160]
        raise TokenizerError(
            f"could not read the tokenizer's weights `{checkpoint}` ({reason}): {remedy}"
        ) from None
    return content.get("state_dict", content)


def _download(address: str) -> dict:
    """Fetch into PyTorch's cache, by one process for all of a machine's."""
    if not is_main_process():
        barrier()
    try:
        return torch.hub.load_state_dict_from_url(address, map_location="cpu", weights_only=True)
    finally:
        if is_main_process():
            barrier()


def _check_initialised(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("initted") and not bool(buffer.all()):
            raise TokenizerError(
                f"the tokenizer's codebook is not initialised (`{name}` is 0), it would be made from the "
                "first batch: take a checkpoint of a trained one, or set quantize_kmeans_init=False"
            )
