"""Weights of a backbone: which file a config names, and what a file holds under its prefix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mapet_mm.evaluation.tokens import adapter_of
from mapet_mm.interop.released import SCHEME, released_weights
from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import UserError, listed
from mapet_mm.weight_files import read_weights, without_wrapper

# Where checkpoints have a backbone's weights, tried in this order: a training's, a bare network's, and those
# of a wrapper of timm or Hugging Face.
PREFIXES = ("backbone.", "", "model.", "model.backbone.", "backbone.timm_model.")
# Tables of Swin Transformers that the model computes itself.
COMPUTED = ("attn_mask", "relative_coords_table")


class WeightsError(UserError):
    """A checkpoint that does not fit the config's backbone."""


def load_weights(network: nn.Module, path: str, prefix: str | None = None) -> list[str]:
    """Load a checkpoint's weights into a network, and print what of the checkpoint is left out.

    Args:
        network: as of `network_of`.
        path: a file, a folder of Hugging Face, an https:// address, or `mapet://NAME`.
        prefix: of the network's names in the checkpoint; None looks for the usual ones.

    Returns:
        Names of the weights that the checkpoint lacks. They are set to NaN.

    Raises:
        WeightsError: none of the network's weights are there; another shape; or weights that change
            features, and the network lacks.
    """
    file = released_weights(path) if path.startswith(SCHEME) else path
    weights = read_weights(file if "://" in str(file) else Path(file).expanduser())
    weights = _as_built(network, weights, path)
    prefix = find_prefix(network, weights, path, prefix)
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    try:
        keys = network.load_state_dict(own, strict=False)
    except (RuntimeError, ValueError) as error:
        raise WeightsError(f"checkpoint {path}: {last_line(error)}") from error
    left_out = _check_left_out(network, own, keys.unexpected_keys, path)
    others = {_part_of(name, prefix) for name in weights if not name.startswith(prefix)}
    others |= {_part_of(prefix + name, prefix) for name in left_out}
    if others:
        print_once(f"{path}: left out, because no features need them: {listed(sorted(others), most=8)}")
    fill_missing(network, keys.missing_keys)
    return list(keys.missing_keys)


def _part_of(name: str, prefix: str) -> str:
    """A name up to the part in which it leaves a prefix: `backbone.mask_token` beside `backbone.vit.`."""
    parts = name.split(".")
    depth = 0
    for part, of_prefix in zip(parts, prefix.split("."), strict=False):
        if part != of_prefix:
            break
        depth += 1
    return ".".join(parts[: depth + 1])


def fill_missing(network: nn.Module, names: Sequence[str]) -> None:
    """Make weights NaN that no file gave: features that need them are NaN, too, and are refused."""
    state = network.state_dict()
    for name in names:
        if name in state and state[name].is_floating_point():
            state[name].fill_(float("nan"))


def last_line(error: Exception) -> str:
    """The last line of an error's message, where PyTorch names the weight."""
    return str(error).splitlines()[-1].strip()


def find_prefix(
    network: nn.Module, weights: Mapping[str, Tensor], path: str, asked: str | None = None
) -> str:
    """The first prefix under which a checkpoint has weights of a network.

    Raises:
        WeightsError: it has none.
    """
    prefixes = [*PREFIXES, f"model.{getattr(network, 'base_model_prefix', '')}."]  # of Hugging Face
    if asked is not None:
        prefixes = [without_wrapper(asked)]
    names = network.state_dict().keys()
    for prefix in prefixes:
        if any(prefix + name in weights for name in names):
            return prefix
    tried = "at the top, under `backbone.` or `model.`" if asked is None else f"under `{asked}`"
    found = _prefixes_there(names, weights)
    if found:
        there = f"but under {listed(found, most=4)}: choose by --prefix, for example --prefix {found[0]}"
    else:
        there = (
            f"(it has {listed(sorted(weights), most=3)}): name the config that it was trained with, or "
            "convert it with `mapet-mm convert`"
        )
    raise WeightsError(f"checkpoint {path} has no weights of the config's backbone {tried}, {there}")


def _prefixes_there(names: Iterable[str], weights: Iterable[str]) -> list[str]:
    """Prefixes under which a checkpoint has at least half of a network's names, most of them first."""
    counts = Counter()
    names = {f".{name}" for name in names}
    for weight in weights:
        # Each of its parts may begin a name of the network's.
        for match in re.finditer(r"\.", weight):
            if weight[match.start() :] in names:
                counts[weight[: match.end()]] += 1
    return [prefix for prefix, count in counts.most_common() if 2 * count >= len(names)]


def _check_left_out(
    network: nn.Module, own: Mapping[str, Tensor], unexpected: Sequence[str], path: str
) -> list[str]:
    """Weights of a checkpoint that the network does not take; WeightsError if its features read them."""
    read = adapter_of(network).reads(network)
    left_out = []
    changing = []
    for name in unexpected:
        # A model that renames weights while loading reports new names: those are float.
        is_table = name in own and not own[name].is_floating_point()
        if is_table or name.endswith(COMPUTED):
            continue
        where = changing if name.partition(".")[0] in read else left_out
        where.append(name)
    if changing:
        raise WeightsError(
            f"checkpoint {path} has {listed(sorted(changing), most=3)}, which the config's backbone lacks, "
            "so its features would differ: name the config that it was trained with"
        )
    return left_out


def _as_built(network: nn.Module, weights: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """Weights under the names of a network of Hugging Face, whose modules may differ from those in its files.

    transformers 5 renames modules while its own class loads a file, so that class loads these weights. Under
    the prefix of a training none are found, and they are returned as they are.
    """
    if not hasattr(network, "from_pretrained"):
        return weights
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # a report of missing weights
    try:
        loaded, found = type(network).from_pretrained(
            None,
            config=network.config,
            state_dict=dict(weights),
            torch_dtype=torch.float32,  # the config's may be half precision
            output_loading_info=True,
        )
    except RuntimeError as error:
        raise WeightsError(f"checkpoint {path}: {last_line(error)}") from error
    own = {name: value for name, value in loaded.state_dict().items() if name not in found["missing_keys"]}
    others = {name: weights.get(name, torch.zeros(())) for name in found["unexpected_keys"]}
    return {**own, **others} if own else weights
