"""Build a frozen network from a config, with all of its weights: trained, or random from a seed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from mmengine.config import ConfigDict
from torch import Tensor, nn

from mapet_mm.models.target_generators.tokenizer import TokenizerError
from mapet_mm.registry import MODELS
from mapet_mm.utils.config import nodes, pretrained_entries, type_name
from mapet_mm.weight_files import read_weights, without_wrapper

# Options by which the networks of timm, Hugging Face and open_clip load weights in their constructors.
OWN_WEIGHTS = ("pretrained", "checkpoint_path")
# Entries of a state dict that count what was seen in training and do not affect features or tokens.
COUNTERS = ("cluster_size", "num_batches_tracked")


def split_checkpoint(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A network's config without `init_cfg`, and the `Pretrained` entry of `init_cfg` (empty if none)."""
    config = ConfigDict(config).to_dict()
    entries = [entry for _, entry in pretrained_entries(config.pop("init_cfg", None))]
    return config, entries[0] if entries else {}


def weights_source(config: Mapping[str, Any]) -> Literal["checkpoint", "constructor", "seed"]:
    """Where a network's config says that its weights come from."""
    config, checkpoint = split_checkpoint(config)
    if checkpoint:
        return "checkpoint"
    for _, node in nodes(config):
        if isinstance(node, Mapping) and any(node.get(option) for option in OWN_WEIGHTS):
            return "constructor"
    return "seed"


def build_frozen(config: Mapping[str, Any], random_seed: int | None) -> tuple[nn.Module, str]:
    """Build a network and load its weights; return it and the name of its weights.

    Args:
        config: of the network. Its weights come from `init_cfg=dict(type="Pretrained", checkpoint=...,
            prefix=...)`, which must have all of them, or from its constructor (`pretrained=True`).
        random_seed: for random weights where the config names none; the caller's generator is left alone.

    Raises:
        TokenizerError: no weights and no seed, weights that nothing loads, or a checkpoint that lacks weights
            or has weights that are not finite.
    """
    source = weights_source(config)
    config, checkpoint = split_checkpoint(config)
    kind = type_name(config["type"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random_seed or 0)
        network = MODELS.build(config)

    if source == "checkpoint":
        load_checkpoint(network, **checkpoint)
        return network, os.path.basename(checkpoint["checkpoint"])

    refuse_nested_checkpoints(network, kind)
    if source == "constructor":
        return network, f"{kind}'s own"

    has_parameters = any(True for _ in network.parameters())
    if random_seed is None and has_parameters:
        raise TokenizerError(
            f"{kind} has no weights: give it init_cfg=dict(type='Pretrained', checkpoint=<address or file>), "
            "or random_seed=<int> for fixed random weights"
        )
    return network, f"random, seed {random_seed or 0}"


def load_checkpoint(network: nn.Module, checkpoint: str, prefix: str | None = None, **_: Any) -> None:
    """Load all weights of a network from a checkpoint, from the names that start with `prefix`."""
    if prefix:
        prefix = without_wrapper(prefix.removesuffix(".") + ".")
    weights = read_weights(checkpoint)
    own = {}
    for name, value in weights.items():
        if name.startswith(prefix or ""):
            own[name.removeprefix(prefix or "")] = value
    load_weights(network, own, checkpoint)


def refuse_nested_checkpoints(network: nn.Module, kind: str) -> None:
    """Raise TokenizerError if a part of a network names weights in its own `init_cfg`."""
    for name, module in network.named_modules():
        if any(pretrained_entries(getattr(module, "init_cfg", None))):
            raise TokenizerError(
                f"`init_cfg` of `{name}` in {kind} names weights that nothing loads: weights of the whole "
                "network go into its own `init_cfg`"
            )


def weights_digest(network: nn.Module) -> str:
    """SHA-256 (hexadecimal) of all weights and statistics, in the order of their names."""
    sha = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        if not name.endswith(COUNTERS):
            sha.update(f"{name}{tuple(tensor.shape)}".encode())
            sha.update(tensor.detach().cpu().contiguous().numpy())
    return sha.hexdigest()


def load_weights(network: nn.Module, weights: Mapping[str, Tensor], file: str) -> None:
    """Load every weight of a network; MMEngine's loading would leave missing ones random.

    The network's own hooks may rename weights and resize position embeddings; others' weights are ignored.

    Raises:
        TokenizerError: weights are missing or not finite.
    """
    missing = network.load_state_dict(weights, strict=False).missing_keys
    names = [name for name in missing if not name.endswith(COUNTERS)]
    if names:
        raise TokenizerError(
            f"checkpoint `{file}` lacks {len(names)} of {len(network.state_dict())} tensors, `{names[0]}` "
            "first: correct the config, its `init_cfg.prefix` or the path"
        )
    diverged = [name for name, value in network.named_parameters() if not value.isfinite().all()]
    # Buffers may have infinity, as a mask.
    diverged += [name for name, value in network.named_buffers() if value.isnan().any()]
    if diverged:
        raise TokenizerError(
            f"checkpoint `{file}` holds NaN or infinity, in `{diverged[0]}` first: its training diverged"
        )
