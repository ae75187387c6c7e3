"""Build a frozen network from a config, with all of its weights: trained, or random from a seed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from mmengine.config import ConfigDict
from torch import Tensor, nn

from mapet_mm.models.target_generators.base import TokenizerError
from mapet_mm.registry import MODELS
from mapet_mm.utils.config import nodes, pretrained_entries, type_name
from mapet_mm.weight_files import read_weights

# Options by which the networks of timm, Hugging Face and open_clip load weights in their constructors.
OWN_WEIGHTS = ("pretrained", "checkpoint_path")
# Entries of a state dict that count what was seen in training and do not affect features or tokens.
COUNTERS = ("cluster_size", "num_batches_tracked")


def split_checkpoint(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A network's config without `init_cfg`, and the `Pretrained` entry of `init_cfg` (empty if none)."""
    config = ConfigDict(config).to_dict()
    return config, next((entry for _, entry in pretrained_entries(config.pop("init_cfg", None))), {})


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
    config, checkpoint = split_checkpoint(config)
    kind = type_name(config["type"])
    own = any(isinstance(node, Mapping) and any(map(node.get, OWN_WEIGHTS)) for _, node in nodes(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random_seed or 0)
        network = MODELS.build(config)
    if checkpoint:
        file, prefix = checkpoint["checkpoint"], checkpoint.get("prefix") or ""
        prefix = prefix and prefix.removesuffix(".") + "."
        weights = read_weights(file)
        kept = {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}
        load_weights(network, kept, file)
        return network, os.path.basename(file)
    for name, module in network.named_modules():
        if any(pretrained_entries(getattr(module, "init_cfg", None))):
            raise TokenizerError(
                f"`init_cfg` of `{name}` in {kind} names weights that nothing loads: weights of the whole "
                "network go into its own `init_cfg`"
            )
    if own:
        return network, f"{kind}'s own"
    if random_seed is None and any(True for _ in network.parameters()):
        raise TokenizerError(
            f"{kind} has no weights: give it init_cfg=dict(type='Pretrained', checkpoint=<address or file>), "
            "or random_seed=<int> for fixed random weights"
        )
    return network, f"random, seed {random_seed or 0}"


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
    if names := [name for name in missing if not name.endswith(COUNTERS)]:
        raise TokenizerError(
            f"checkpoint `{file}` lacks {len(names)} of {len(network.state_dict())} tensors, `{names[0]}` "
            "first: correct the config, its `init_cfg.prefix` or the path"
        )
    parameters = (name for name, value in network.named_parameters() if not value.isfinite().all())
    buffers = (name for name, value in network.named_buffers() if value.isnan().any())  # masks have infinity
    if name := next(chain(parameters, buffers), None):
        raise TokenizerError(
            f"checkpoint `{file}` holds NaN or infinity, in `{name}` first: its training diverged"
        )
