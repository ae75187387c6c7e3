"""Tokenizers from other libraries, for example MMPretrain's VQ-KD and DALL-E, frozen and checked."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any
from urllib.parse import urlparse

import torch
from filelock import FileLock
from jaxtyping import Float, Int64
from mmengine.config import ConfigDict
from torch import Tensor, nn

from mapet_mm.models.target_generators.base import Tokenizer, full_float32
from mapet_mm.models.utils.token_ids import token_ids
from mapet_mm.registry import MODELS
from mapet_mm.utils.config import pretrained_entries, type_name, with_type_names
from mapet_mm.utils.errors import UserError, reason_of
from mapet_mm.weight_files import non_finite, read_weights

# Running statistics that do not affect tokens.
STATISTICS = ("cluster_size",)
OPTION = "init_cfg.checkpoint"


class TokenizerError(UserError, ValueError):
    """A tokenizer's weights cannot be found or do not fit; the message is one line."""


@MODELS.register_module()
class FrozenTokenizer(Tokenizer):
    """Target generator: any module that maps images to token ids or to logits over a vocabulary.

    It is never in training mode, in which MMPretrain's VQ-KD would keep updating its codebook.

    Args:
        tokenizer: config of the module, for example `dict(type="VQKD", ..., init_cfg=dict(type="Pretrained",
            checkpoint=<address or file>))`. The checkpoint must have all of the module's weights; additional
            entries are ignored.
        image_size: side of the input images in pixels.
        vocab_size: number of token ids.
        random_seed: draw fixed random weights from this seed if there is no checkpoint.

    Raises:
        TokenizerError: there is neither a checkpoint nor a seed, the checkpoint cannot be found or lacks
            weights, it is given where nothing loads it, or VQ-KD's codebook is not initialised.
    """

    def __init__(
        self,
        tokenizer: Mapping[str, Any],
        image_size: int,
        vocab_size: int,
        random_seed: int | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        config, checkpoint = split_checkpoint(tokenizer)
        if not checkpoint and random_seed is None:
            raise TokenizerError(no_weights("tokenizer", config))
        # A checkpoint has all weights, so what else names some does not matter then.
        refuse_unloaded_weights("tokenizer", config, None if checkpoint else random_seed, init_cfg)
        model = build_frozen("tokenizer", config, checkpoint, random_seed or 0)
        _check_initialised(model)
        super().__init__(model, image_size, init_cfg)
        self.vocab_size = vocab_size
        self.description = {
            "tokenizer": with_type_names(config),
            "image_size": image_size,
            "vocab_size": vocab_size,
        }
        self._checked = False

    @property
    def model(self) -> nn.Module:
        """The tokenizer itself."""
        return self._network[0]

    @cached_property
    def grid(self) -> tuple[int, int]:
        """(H, W) tokens of an image of `image_size`; the grid is square."""
        tensors = chain(self.model.parameters(), self.model.buffers())  # a rule may have none
        device = next(tensors, torch.empty(0)).device
        tokens = self(torch.zeros(1, 3, self.image_size, self.image_size, device=device))
        self._checked = False  # a black image does not test the ids' range
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
            ValueError: the images have another size, or ids are outside the vocabulary.
        """
        self.check_size(images)
        with full_float32(images.device):
            tokens = token_ids(self.model(images.float()))
        self._check_ids(tokens, tokens.device.type)
        return tokens

    def _check_ids(self, tokens: Tensor, device_type: str) -> None:
        # Reading the ids waits for the device, so on a GPU only the first batch is checked.
        if device_type != "cpu" and self._checked:
            return
        if (highest := int(tokens.max())) >= self.vocab_size:
            raise ValueError(
                f"the tokenizer gives token id {highest}, but `vocab_size` is {self.vocab_size}: set it to "
                "the size of the tokenizer's codebook"
            )
        self._checked = True


def split_checkpoint(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A network's config without `init_cfg`, and the `Pretrained` entry of `init_cfg` (empty if none)."""
    config = ConfigDict(config).to_dict()
    return config, next((entry for _, entry in pretrained_entries(config.pop("init_cfg", None))), {})


def refuse_unloaded_weights(
    what: str, config: Mapping[str, Any], random_seed: int | None, init_cfg: Mapping | Sequence | None
) -> None:
    """Refuse checkpoints in places from which nothing loads them.

    Args:
        what: "tokenizer" or "encoder", the option that has the network's config.
        config: the network's config without its own `init_cfg`.
        random_seed: the network's, which alone would decide the weights.
        init_cfg: of the module that holds the network.

    Raises:
        TokenizerError: there is such a checkpoint.
    """
    if any(pretrained_entries(init_cfg)):
        raise TokenizerError(f"`init_cfg` of the tokenizer itself loads nothing: put it into `{what}`")
    if random_seed is not None and (unloaded := next(pretrained_entries(config), None)):
        where = unloaded[0].rstrip(".0123456789")  # without its place in a list
        raise TokenizerError(
            f"`{where}` of the {what} names weights that nothing loads, and random_seed={random_seed} draws "
            f"others: remove one; weights of the whole {what} go into its own `init_cfg`"
        )


def build_frozen(what: str, config: Mapping[str, Any], checkpoint: Mapping[str, Any], seed: int) -> nn.Module:
    """Build a network with all weights from a checkpoint, or with its constructor's weights under a seed.

    Args:
        what: "tokenizer" or "encoder", for the messages.
        config: the network's config without `init_cfg`.
        checkpoint: a `Pretrained` entry of `init_cfg`; empty for the constructor's weights.
        seed: for the random weights; the caller's generator is left unchanged.

    Raises:
        TokenizerError: the checkpoint cannot be found, lacks weights, or has weights that are not finite.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS.build(config)
    if checkpoint:
        _load(what, model, checkpoint["checkpoint"], checkpoint.get("prefix"))
    return model


def no_weights(what: str, config: Mapping[str, Any]) -> str:
    """Error message for a network without weights."""
    return (
        f"{what} {type_name(config['type'])} has no weights: give it init_cfg=dict(type='Pretrained', "
        "checkpoint=<address or file>), or random_seed=<int> for fixed random weights"
    )


def _load(what: str, model: nn.Module, checkpoint: str, prefix: str | None) -> None:
    """Load every weight of a network; MMEngine's loading would leave missing ones random."""
    weights = _read(what, checkpoint)
    if prefix:
        weights = _below(weights, prefix if prefix.endswith(".") else f"{prefix}.", checkpoint)
    expected = model.state_dict()
    problem, names = "lacks", []
    try:  # the network's own hooks rename weights and resize position embeddings
        names = model.load_state_dict(weights, strict=False).missing_keys
        names = [name for name in names if not name.endswith(STATISTICS)]
    except RuntimeError:
        problem = "has other shapes for"
        names = [name for name in expected if name in weights and weights[name].shape != expected[name].shape]
    if names:
        remedy = f"it belongs to another architecture; correct the {what}'s config or `{OPTION}`"
        longer = next((name for name in weights if name.endswith(f".{names[0]}")), None)
        if longer and not prefix and weights.keys().isdisjoint(expected):
            remedy = f"it has that as `{longer}`; set `init_cfg.prefix`"
        raise TokenizerError(
            f"checkpoint `{checkpoint}` {problem} {len(names)} of the {what}'s {len(expected)} "
            f"tensors, `{names[0]}` first: {remedy}"
        )
    if name := non_finite(model):
        raise TokenizerError(
            f"checkpoint `{checkpoint}` holds NaN or infinity, in `{name}` first: its training diverged; "
            f"give another by `{OPTION}`"
        )


def _below(weights: Mapping[str, Tensor], prefix: str, checkpoint: str) -> dict[str, Tensor]:
    """The weights below a prefix, without it."""
    found = {name[len(prefix) :]: tensor for name, tensor in weights.items() if name.startswith(prefix)}
    if not found:
        names = ", ".join(f"`{name}`" for name in sorted({name.split(".")[0] for name in weights})[:8])
        raise TokenizerError(
            f"checkpoint `{checkpoint}` has nothing with the prefix `{prefix}`: it has {names}; correct "
            "`init_cfg.prefix`"
        )
    return found


def _read(what: str, checkpoint: str) -> dict[str, Tensor]:
    """The state dict of a file or an address; only tensors are unpickled."""
    remedy = f"give a local file by `{OPTION}`, or correct it"
    if not checkpoint:
        raise TokenizerError(f"the {what}'s `{OPTION}` is empty: {remedy}")
    if "://" not in checkpoint and not os.path.isfile(checkpoint):
        raise TokenizerError(f"the {what}'s weights `{checkpoint}` do not exist: {remedy}")
    try:
        return read_weights(_download(checkpoint) if "://" in checkpoint else checkpoint)
    except Exception as error:  # the remedy is the same for all errors
        raise TokenizerError(
            f"could not read the {what}'s weights `{checkpoint}` ({reason_of(error)[:160]}): {remedy}"
        ) from None


def _download(address: str) -> str:
    """Download into PyTorch's cache, in one process of all that share it, and return the file."""
    folder = os.path.join(torch.hub.get_dir(), "checkpoints")
    os.makedirs(folder, exist_ok=True)
    file = os.path.join(folder, os.path.basename(urlparse(address).path))
    with FileLock(f"{file}.lock"):
        if not os.path.isfile(file):
            torch.hub.download_url_to_file(address, file)
    return file


def _check_initialised(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("initted") and not bool(buffer.all()):
            raise TokenizerError(
                f"the tokenizer's codebook is not initialised (`{name}` is 0), it would be made from the "
                "first batch: take a checkpoint of a trained one, or set quantize_kmeans_init=False"
            )
