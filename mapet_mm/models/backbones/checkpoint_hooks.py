"""Position embeddings of a checkpoint, brought to the grid of the backbone that takes them."""

import logging
from math import isqrt, prod

import torch
from mmengine.logging import print_log
from mmengine.runner.checkpoint import CheckpointLoader
from mmpretrain.models.utils import resize_pos_embed
from torch import Tensor, nn

from mapet_mm.utils.config import pretrained_entries

# A backbone's entry in the metadata that PyTorch saves beside the parameters of a state dict.
METADATA_KEY = "patch_grid"

Grid = tuple[int, int]


def record_grid(vit: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: dict) -> None:
    """State dict hook: say in the metadata which grid the position embeddings cover."""
    local_metadata[METADATA_KEY] = tuple(vit.patch_resolution)


def grid_of_init(init_cfg: dict | list[dict] | None) -> Grid | None:
    """The grid that the checkpoint of a backbone's `init_cfg` records, or None.

    Only with a prefix, which MMEngine cuts off together with the metadata: the file is read once more.

    Args:
        init_cfg: as for any MMEngine module.

    Raises:
        ValueError: the checkpoint has nothing behind the prefix.
    """
    for _, entry in pretrained_entries(init_cfg):
        if prefix := entry.get("prefix"):
            checkpoint = CheckpointLoader.load_checkpoint(
                entry["checkpoint"], map_location="cpu", logger="silent"
            )
            weights = checkpoint.get("state_dict", checkpoint)
            module = prefix.removesuffix(".")
            if not any(name.startswith(f"{module}.") for name in weights):
                raise ValueError(
                    f"{entry['checkpoint']} has no weights behind `{module}.`, but "
                    f"`{next(iter(weights), '')}`, ...: correct the prefix in the backbone's `init_cfg` or "
                    "leave it out; weights of another library go through tools/convert.py first"
                )
            metadata = getattr(weights, "_metadata", None) or {}
            return metadata.get(module, {}).get(METADATA_KEY)
    return None


def fit_positions(vit: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: dict) -> None:
    """Bring the position embeddings of a state dict, in place, to the backbone's class token and grid.

    Args:
        vit: a `MaPeTViT`.
        state_dict: the state dict.
        prefix: what the backbone's names start with in it.
        local_metadata: the state dict's metadata of the backbone.

    Raises:
        ValueError: the grid that the embeddings cover is not known.
    """
    name = f"{prefix}pos_embed"
    if name not in state_dict:
        return
    positions = state_dict[name]
    # N D of the class token, which is there if the class token is, and of the patches
    of_class, of_patches = positions.tensor_split([int(f"{prefix}cls_token" in state_dict)], dim=1)
    own = tuple(vit.patch_resolution)
    grid = source_grid(of_patches.shape[1], own, local_metadata.get(METADATA_KEY), vit.pretrained_grid)
    if grid != own:
        print_log(f"Resized `{name}` from {grid} to {own} patches.", logger="current")
        of_patches = resize_pos_embed(of_patches, grid, own, vit.interpolate_mode, num_extra_tokens=0)
    if of_class.shape[1] != vit.num_extra_tokens:
        own_class = vit.pos_embed[:, : vit.num_extra_tokens].detach()
        of_class = own_class.to(of_patches.device, of_patches.dtype)
    if of_patches.shape[1] + of_class.shape[1] != positions.shape[1] or grid != own:
        state_dict[name] = torch.cat([of_class, of_patches], dim=1)


def source_grid(num_patches: int, own: Grid, recorded: Grid | None, told: Grid | None) -> Grid:
    """The grid, (rows, columns), that so many position embeddings cover.

    A square is taken for granted where nobody says it, with a warning if the backbone's own is none.

    Args:
        num_patches: how many they are.
        own: the grid of the backbone that takes them.
        recorded: what the checkpoint says.
        told: what the backbone's `pretrained_grid` says.

    Raises:
        ValueError: nobody says it, and more than a square or the backbone's own grid comes into question.
    """
    if recorded is not None and prod(recorded) == num_patches:
        return tuple(recorded)
    if told is not None and num_patches in (prod(told), prod(own)):
        return told if num_patches == prod(told) else own
    side = isqrt(num_patches)
    square = (side, side)
    if side * side == num_patches and (own == square or num_patches != prod(own)):
        if own[0] != own[1]:
            print_log(
                f"Assumed a square grid of {side} x {side} patches for the checkpoint's position embeddings, "
                f"which does not say it (here: {own}): if it was another, set the backbone's "
                "`pretrained_grid` to its (rows, columns).",
                logger="current",
                level=logging.WARNING,
            )
        return square
    raise ValueError(
        f"the checkpoint's position embeddings cover {num_patches} patches, but it does not say in which "
        f"grid (here: {own}): set the backbone's `pretrained_grid` to the (rows, columns) of patches that it "
        "was trained on"
    )
