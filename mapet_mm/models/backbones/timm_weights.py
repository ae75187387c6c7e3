"""What a `TIMMViT` is built from, a name of timm's or files of a whole network, and what it loads."""

import json
from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any

from mmengine.logging import print_log
from torch import Tensor, nn

from mapet_mm.models.backbones.checkpoint_hooks import OF_TIMM, CheckpointNamesError, fit_bands
from mapet_mm.utils.errors import UserError, listed
from mapet_mm.utils.run_folder import EXPORTS, Run
from mapet_mm.weight_files import read_checkpoint, read_weights

LOCAL = "local-dir:"  # timm's scheme
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in a folder of timm's
POSITIONS = f"{OF_TIMM}pos_embed"


class SourceError(UserError, ValueError):
    """A `TIMMViT` that cannot be: of a file or folder without one, or with outputs that it has not."""


def read_source(model_name: str) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    """The ViT of a `TIMMViT`'s `model_name`: of a RUN, its `epoch_N.pth`, a folder of timm's, or a name.

    Returns:
        Arguments of `TIMMViT` for the network, its name in timm among them; and its weights, None of a name.

    Raises:
        SourceError: nothing of that name, or without such a model.
    """
    path = Path(model_name.removeprefix(LOCAL)).expanduser()
    if path.is_file():
        return _of_checkpoint(path)
    if Run(path).exists:
        return _of_checkpoint(Run(path).newest_checkpoint)
    if path.is_dir():
        return _of_folder(path)
    from timm import is_model

    has_other_scheme = ":" in model_name and not model_name.startswith(LOCAL)
    if has_other_scheme or is_model(model_name):
        return dict(model_name=model_name), None
    raise SourceError(f"{model_name}: no model of timm, no folder and no file (seen from {Path.cwd()})")


def _of_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The ViT of a checkpoint whose training continued one of another library."""
    weights, meta = read_checkpoint(path)
    exports = meta.get(EXPORTS)
    if not exports:
        raise SourceError(
            f"{path} does not say that it continues a ViT of timm or Hugging Face: for MaPeT's own ViT, take "
            f'dict(type="mapet_mm.MaPeTViT", arch=..., init_cfg=dict(type="Pretrained", checkpoint="{path}", '
            'prefix="backbone."))'
        )
    options = _network(exports["timm"])
    options["img_size"] = exports["images"]["img_size"][0]
    if exports["norm_eps"] is not None:
        options["norm_eps"] = exports["norm_eps"]
    return options, of_backbone(weights)


def _of_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The ViT of a folder that timm loads."""
    known = folder / "config.json"
    content = json.loads(known.read_text()) if known.is_file() else {}
    if "architecture" not in content:
        raise SourceError(
            f"{folder} is neither a RUN of `mapet-mm pretrain` nor a folder of timm's, such as RUN/timm"
        )
    files = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    if not files:
        raise SourceError(f"{folder} has no weights: neither {' nor '.join(WEIGHTS)}")
    return _network(content), read_weights(files[0])


def _network(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `TIMMViT` for the network that a config of timm's describes."""
    options = dict(config.get("model_args") or {})
    options.pop("num_classes", None)
    options["model_name"] = config["architecture"]
    options["in_channels"] = options.pop("in_chans", 3)
    return options


def of_backbone(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A ViT of timm's weights in a training's checkpoint; all of another file's."""
    whole = f"backbone.{OF_TIMM}"
    own = {name.removeprefix("backbone."): v for name, v in weights.items() if name.startswith(whole)}
    return own or dict(weights)


def adapt_timm_checkpoint(vit: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Loading hook of `TIMMViT`: make a state dict one of this backbone, in place.

    Names may be timm's own, without `timm_model.`. The mask token, a classifier, and a norm after the last
    layer that the backbone leaves out are dropped; position embeddings are resized as timm does.

    Raises:
        CheckpointNamesError: of a state dict of the backbone alone, unless its weights are just the
            backbone's; MMEngine would only log that.
        ValueError: position embeddings of another grid, which is not a square.
    """
    own = {prefix + name: value for name, value in vit.state_dict().items()}
    is_alone = not prefix  # a whole model may be given weights of other parts, a backbone alone may not
    if is_alone and any(name.startswith("blocks.") for name in state_dict):
        renamed = {OF_TIMM + name: value for name, value in state_dict.items()}
        state_dict.clear()  # in place, because the caller goes on with this dictionary
        state_dict.update(renamed)
    dropped = (f"{prefix}mask_token", *(f"{prefix}{OF_TIMM}{part}." for part in ("head", "norm", "fc_norm")))
    for name in [name for name in state_dict if name not in own and name.startswith(dropped)]:
        del state_dict[name]
        print_log(f"Dropped `{name}`: the backbone has none.", "current")
    if is_alone:
        _require_same_weights(own, state_dict)
    _fit_positions(vit.timm_model, state_dict, prefix + POSITIONS)


def fit_timm_bands(vit: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Loading hook of `TIMMViT` and of its network, which may be loaded alone: see `fit_bands`."""
    inside = OF_TIMM if hasattr(vit, "timm_model") else ""
    fit_bands(vit.state_dict(), state_dict, prefix, f"{inside}patch_embed.proj.weight")


def _require_same_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise CheckpointNamesError unless weights have a backbone's names, and but for positions its shapes."""
    strange = [name for name in weights if name not in own]
    if own.keys().isdisjoint(weights):
        remedy = 'the weights of a RUN of `mapet-mm pretrain` are below `init_cfg`\'s prefix="backbone."'
        raise CheckpointNamesError(
            f"the checkpoint has none of the backbone's weights, but {listed(strange, 3)}: {remedy}"
        )
    missing = [name for name in own if name not in weights]
    shared = [name for name in own if name in weights and name != POSITIONS]
    reshaped = [name for name in shared if weights[name].shape != own[name].shape]
    wrong = [*reshaped, *strange, *missing]
    if wrong:
        raise CheckpointNamesError(
            f"the checkpoint is of another network: {len(wrong)} weights are missing, too many or of another "
            f"shape, {listed(wrong, 3)}: give the sizes of what was trained, or as `model_name` the RUN, "
            "which has them"
        )


def _fit_positions(vit: nn.Module, state_dict: dict[str, Tensor], name: str) -> None:
    """Resize the position embeddings of a state dict, in place, to the grid of a ViT of timm."""
    positions = state_dict.get(name)
    if positions is None or vit.pos_embed is None or positions.shape[1] == vit.pos_embed.shape[1]:
        return
    from timm.layers import resample_abs_pos_embed

    num_extra_tokens = 0 if vit.no_embed_class else vit.num_prefix_tokens
    num_patches = positions.shape[1] - num_extra_tokens
    side = isqrt(max(num_patches, 0))
    if side * side != num_patches:
        raise ValueError(f"`{name}` has positions of {num_patches} patches, which are no square to resize")
    grid = vit.patch_embed.grid_size
    print_log(f"Resized `{name}` from {(side, side)} to {grid} patches.", "current")
    state_dict[name] = resample_abs_pos_embed(positions, grid, (side, side), num_extra_tokens)
