"""What `mapet-mm pretrain --init` starts from: models of timm and Hugging Face, files of weights, other RUNs.

The weights are fetched and converted once, into RUN/init.pth, so that RUN needs neither network nor source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmengine.logging import MMLogger
from mmpretrain.models.backbones import VisionTransformer
from torch import Tensor, nn

from mapet_mm.cli.start_models import grid_of, of_hugging_face, of_timm
from mapet_mm.evaluation.libraries import one_line
from mapet_mm.interop.convert import FINAL_NORM, as_start, sizes_of
from mapet_mm.interop.description import ContinuedViT, Preparation
from mapet_mm.interop.names import MASK_TOKEN, MODEL_TYPES, TIMM_NETWORK
from mapet_mm.registry import MODELS
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import digest, digest_of_file
from mapet_mm.utils.run_folder import EXPORTS, INIT, PRETRAINING, Run
from mapet_mm.weight_files import read_checkpoint, write_weights

ARCHS = ("tiny", "small", "base")
NAMED = ("timm", "hf")
TAKEN = (
    "--init takes timm:NAME or timm:local-dir:FOLDER (VisionTransformer and Eva with a class token: DINOv2, "
    f"DINOv3, EVA-02, ...), hf:NAME_OR_FOLDER ({', '.join(MODEL_TYPES)}), a file of a plain ViT's weights "
    "(patches of 16, tiny, small or base), or the RUN of another `mapet-mm pretrain`"
)
FILE_TAKEN = (
    "a file may hold a plain ViT with class token and final norm, patches of 16, tiny, small or base; take "
    "weights of DINO, DINOv2, DINOv3 or MAE by name: timm:vit_small_patch8_224.dino, "
    "hf:facebook/dinov2-small, timm:vit_small_patch16_dinov3.lvd1689m, timm:vit_large_patch16_224.mae, ..."
)
FETCHED = "check the name and the network, or name a copy: timm:local-dir:FOLDER, hf:FOLDER"
PATCH = 16  # side in pixels of a plain ViT's patches
GRID = 14  # of them per side of an image of 224 pixels


@dataclass(frozen=True)
class Start:
    """Weights to start from, which are in RUN/init.pth.

    Args:
        words: lines for the user.
        arch: 'tiny' | 'small' | 'base' of MMPretrain's plain ViT; None for a network of timm.
        grid: patches per side of an image.
        network: config of the backbone for another network.
        vit: the network of another library; None for a plain ViT.
    """

    words: list[str]
    arch: str | None = None
    grid: int = GRID
    network: dict[str, Any] | None = None
    vit: ContinuedViT | None = None

    @property
    def images(self) -> Preparation | None:
        """How the network takes its images; None for a file of weights, which does not say."""
        return self.vit.images if self.vit else None


def take_start(source: str, out: Path, arch: str | None, side: int | None = None) -> Start:
    """Write the weights of a start into a RUN.

    Args:
        source: as for `--init`.
        out: the RUN.
        arch: size of the ViT, if it was asked for.
        side: of the training's images in pixels, if it was asked for.

    Raises:
        UserError: there is no such start, or it cannot be continued; the line names what can.
    """
    start, weights = read_start(source, arch, side)
    write_weights(out / INIT, weights, {EXPORTS: asdict(start.vit)} if start.vit else None)
    return start


def read_start(source: str, arch: str | None, side: int | None) -> tuple[Start, dict[str, Tensor]]:
    """A start and its weights; see `take_start`."""
    library, _, name = source.partition(":")
    path = Path(source)
    if library not in NAMED and path.is_dir():
        if Run(path).exists:
            last = Run(path).newest_checkpoint
            return _of_file(f"{source} ({last.name})", last, arch, side)
        if not (path / "config.json").is_file():
            raise UserError(f"--init {source}: a folder without config.json or {PRETRAINING}; {TAKEN}")
        is_of_timm = '"architecture"' in (path / "config.json").read_text()
        library, name = ("timm", f"local-dir:{source}") if is_of_timm else ("hf", source)
    if library not in NAMED:
        return _of_file(source, path, arch, side)

    if arch:
        raise UserError(f"--init {source}: the model has its own size; leave out --arch {arch}")
    take = of_timm if library == "timm" else of_hugging_face
    with one_line(f"--init {source}", FETCHED, TAKEN):
        vit, weights = take(name, side)
        return _of_another_library(source, vit, weights)


def _of_file(source: str, path: Path, arch: str | None, side: int | None) -> tuple[Start, dict[str, Tensor]]:
    """A file of a plain ViT's weights; or one that this command wrote, of another ViT."""
    weights, meta = read_checkpoint(path)
    if EXPORTS not in meta:
        return _of_plain_vit(path, weights, arch, side)
    vit = ContinuedViT.read(meta[EXPORTS])
    trained_at = vit.images.img_size[0]
    if side not in (None, trained_at):
        raise UserError(f"--init {source}: trained on images of {trained_at} pixels; leave --image-size out")
    with one_line(f"--init {source}", FETCHED, TAKEN):
        return _of_another_library(source, vit, weights)


def _of_plain_vit(
    path: Path, weights: Mapping[str, Tensor], arch: str | None, side: int | None
) -> tuple[Start, dict[str, Tensor]]:
    """A plain ViT of one of the sizes that the pre-training has recipes for, under any names."""
    try:
        weights, told = as_start(weights)
    except ValueError as error:
        raise UserError(f"--init {path}: {error}; {FILE_TAKEN}") from error
    sizes = sizes_of(weights)
    patch = weights["backbone.patch_embed.projection.weight"].shape[-1]
    known = {}  # with --arch only that one
    for name in [arch] if arch else ARCHS:
        settings = VisionTransformer.arch_zoo[f"deit-{name}"]
        known[name] = {key: settings[key] for key in sizes}
    refused = {
        f"a ViT with {sizes}, not one of {known}": sizes not in known.values(),
        f"a ViT with patches of {patch}": patch != PATCH,
        "a ViT without a class token": "backbone.cls_token" not in weights,
        "weights without a final norm (of a fine-tuned MAE?)": FINAL_NORM not in weights,
        "weights that are not finite": not all(value.isfinite().all() for value in weights.values()),
    }
    for what, is_found in refused.items():
        if is_found:
            raise UserError(f"--init {path}: {what}; {FILE_TAKEN}")
    (found,) = (name for name in known if known[name] == sizes)
    grid = grid_of(side, PATCH) if side else GRID
    return Start([f"start: {path}, {told}"], arch=found, grid=grid), weights


def _of_another_library(
    source: str, vit: ContinuedViT, weights: Mapping[str, Tensor]
) -> tuple[Start, dict[str, Tensor]]:
    """A network of timm with these weights, on which the method runs.

    Raises:
        ValueError: it does not, or weights are missing or not finite.
    """
    side = vit.images.img_size[0]
    network = dict(
        {k: v for k, v in vit.timm["model_args"].items() if k not in ("in_chans", "num_classes")},
        type="mapet_mm.MaPeTPretrainTIMM",
        model_name=vit.timm["architecture"],
        img_size=side,
    )
    if vit.norm_eps is not None:
        network["norm_eps"] = vit.norm_eps
    sizes = vit.sizes
    grid = side // sizes["patch_size"]
    network["cutting_point"] = sizes["num_extra_tokens"] + context_patches(grid, sizes["embed_dims"])

    kept = {name: value for name, value in weights.items() if name.startswith((TIMM_NETWORK, MASK_TOKEN))}
    with _only_warnings():
        _require_whole(MODELS.build(network), kept)
    words = [
        f"start: {source}, timm's {network['model_name']} ({sizes['embed_dims']} wide), images of "
        f"{side} pixels in {grid} x {grid} patches"
    ]
    if vit.hf is None:
        words.append("export: for timm alone; Hugging Face has no network that computes the same")
    if vit.norm_eps is not None:
        timms = MODEL_TYPES[vit.hf["model_type"]].eps
        words.append(
            f"export: the start's norms add {vit.norm_eps} to the variance, timm's {timms}: features of "
            "RUN/timm differ a little from RUN/huggingface's"
        )
    return Start(words, grid=grid, network=network, vit=vit), kept


def context_patches(grid: int, embed_dims: int) -> int:
    """Patches that are context: the paper's share, 49 of 196, or 59 of 196 for ViT-B and larger."""
    paper = 59 if embed_dims >= 768 else 49
    return max(1, grid * grid * paper // 196)


@contextmanager
def _only_warnings() -> Iterator[None]:
    """Leave out MMPretrain's lines about each layer of a backbone, and ours about its mask token."""
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel("WARNING")
    try:
        yield
    finally:
        logger.setLevel(level)


def _require_whole(vit: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the weights are all of the network's, but for the mask token."""
    own = {name.removeprefix("backbone."): value for name, value in weights.items()}
    missing, unexpected = vit.load_state_dict(own, strict=False)
    wrong = [*missing, *unexpected]
    if wrong:
        raise ValueError(f"{len(wrong)} weights do not fit the network, `{wrong[0]}` first")
    for name, value in own.items():
        if not value.isfinite().all():
            raise ValueError(f"`{name}` has values that are not finite")


def source_digest(source: str) -> str | None:
    """Digest of the files of a start that is a file or a model's folder.

    None of a name, of one that is gone, and of a RUN: it may have been trained further since.
    """
    library, _, name = source.partition(":")
    path = Path(name.removeprefix("local-dir:") if library in NAMED else source)
    if path.is_file():
        return digest_of_file(path)
    if not (path / "config.json").is_file():
        return None
    files = sorted(file for file in path.iterdir() if file.is_file())
    return digest([[file.name, digest_of_file(file)] for file in files])
