"""k-CLIP: visual tokens as nearest centroids of CLIP ResNet grid features (paper Section 4.2).

The tower is open_clip's architecture without the text tower, with any weights.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mapet_mm.models.target_generators.frozen_network import load_weights
from mapet_mm.models.target_generators.grid_kmeans import GridKMeans
from mapet_mm.models.target_generators.tokenizer import TokenizerError
from mapet_mm.registry import MODELS
from mapet_mm.structures.codebook import Codebook
from mapet_mm.utils.dist import print_to_user
from mapet_mm.utils.errors import reason_of
from mapet_mm.utils.shared_work import shared_lock
from mapet_mm.weight_files import limited_silence, read_weights

if TYPE_CHECKING:  # open_clip is imported only where a tower is built
    from open_clip.modified_resnet import ModifiedResNet

STRIDE = 32  # of the stem (two strides) and three stages
REMEDY = (
    "give a local weights file (pretrained='/path/to/weights.pt' or .safetensors), or try it with "
    "clip_model=dict(layers=[1, 1, 1, 1], width=8, image_size=448), pretrained=dict(type='random', seed=0)"
)


def grid_features(
    visual: nn.Module, images: Float[Tensor, "batch 3 height width"]
) -> Float[Tensor, "batch grid dim"]:
    """Output of a CLIP ResNet tower's last residual stage, after its ReLU and before attention pooling.

    Args:
        visual: open_clip's `ModifiedResNet`.
        images: (B, 3, H, W), normalised with CLIP's mean and standard deviation.

    Returns:
        (B, H/32 * W/32, D), positions in raster order.
    """
    features = visual.stem(images)
    for stage in (visual.layer1, visual.layer2, visual.layer3, visual.layer4):
        features = stage(features)
    return features.flatten(2).transpose(1, 2)  # B D H W -> B (H W) D


@MODELS.register_module()
class KCLIP(GridKMeans):
    """Target generator: the nearest centroid's index for each feature of an image's CLIP grid.

    Args:
        clip_model: a CLIP ResNet of open_clip, or `dict(layers, width, image_size)` for a small one.
        pretrained: a weights tag of open_clip, a local weights file, or `dict(type="random", seed=0)`.
        codebook: path of the codebook (or a `Codebook`); None to compute features only.
        image_size: side of the input images in pixels, if not the architecture's own.
        stride: pixels from one grid position to the next: 32, or 16, 8 or 4 for a finer grid.
        precision: what the tower computes in (see `GridKMeans`); the authors' is 'float16'.

    Raises:
        TokenizerError: the tower's weights cannot be found or do not fit, or the stride, the precision or
            the image's size is not supported.
        CodebookError: the codebook cannot be read or was fitted on another encoder.

    Examples:
        >>> small = dict(layers=[1, 1, 1, 1], width=8, image_size=64)  # the paper's is "RN50x64"
        >>> kclip = KCLIP(small, pretrained=dict(type="random", seed=0))
        >>> kclip.features(torch.randn(2, 3, 64, 64)).shape  # of a grid of 2 x 2
        torch.Size([2, 4, 256])
    """

    def __init__(
        self,
        clip_model: str | Mapping[str, Any] = "RN50x64",
        pretrained: str | Mapping[str, Any] = "openai",
        codebook: str | os.PathLike | Codebook | None = None,
        image_size: int | None = None,
        stride: int = STRIDE,
        precision: str = "float32",
    ) -> None:
        image_size = image_size or tower_config(clip_model)["image_size"]
        if image_size % stride:
            raise TokenizerError(f"KCLIP's image_size must be a multiple of {stride} px, got {image_size}")
        self.stride = stride
        self._tower = (clip_model, pretrained)
        tower = build_tower(clip_model, pretrained, stride)
        super().__init__(tower, image_size, codebook, precision=precision)

    def _describe(self, *_: Any) -> dict[str, Any]:
        encoder, weights = self._tower
        if isinstance(encoder, Mapping):
            encoder = f"ModifiedResNet-{'-'.join(map(str, encoder['layers']))}-width{encoder['width']}"
        if self.stride != STRIDE:
            encoder += f" with stride {self.stride}"
        is_random = isinstance(weights, Mapping)
        words = f"random, seed {weights.get('seed', 0)}" if is_random else os.path.basename(weights)
        return {"encoder": encoder, "weights": words}

    def _measure(self) -> tuple[int, int]:
        # not by a pass through the tower, which takes seconds
        return self.image_size // self.stride, self.network.layer4[-1].conv3.out_channels


def tower_config(clip_model: str | Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of open_clip's `ModifiedResNet` for a model name, or for a dict of a small architecture.

    Args:
        clip_model: a CLIP ResNet that open_clip knows ('RN50x64'), or `dict(layers, width, image_size)`.
    """
    import open_clip

    config = {"vision_cfg": clip_model}
    if isinstance(clip_model, str):
        config = open_clip.get_model_config(clip_model) or {"vision_cfg": {}}
    vision = config["vision_cfg"]
    if not isinstance(vision.get("layers"), list | tuple):
        known = ", ".join(name for name in open_clip.list_models() if name.startswith("RN"))
        raise TokenizerError(
            f"clip_model '{clip_model}' is not a CLIP ResNet of open_clip: choose one of {known}, give a "
            "dict with layers, width and image_size, or take a GridKMeans with type='open_clip.create_model'"
        )
    width = vision["width"]
    return {
        "layers": list(vision["layers"]),
        "width": width,
        "image_size": vision["image_size"],
        "heads": max(1, width // 2),
        "output_dim": config.get("embed_dim", width * 32),
    }


def build_tower(
    clip_model: str | Mapping[str, Any], pretrained: str | Mapping[str, Any], stride: int = STRIDE
) -> ModifiedResNet:
    """Visual tower in float32 and eval mode, frozen, without its attention pooling (features come before it).

    Args:
        clip_model: see `tower_config`.
        pretrained: a weights tag of open_clip ('openai'), a local weights file (.pt, .pth, .bin or
            .safetensors with a CLIP state dict or the tower's own), or `dict(type="random", seed=0)` for
            fixed random weights.
        stride: pixels from one grid position to the next (see `set_stride`).

    Raises:
        TokenizerError: the architecture, weights or stride are unknown, or the weights cannot be fetched or
            do not fit.
    """
    config = tower_config(clip_model)
    if isinstance(pretrained, Mapping):
        tower = _random_tower(config, **pretrained)
    else:
        with torch.device("meta"):  # no initialisation
            tower = _bare_tower(config)
        is_fetched = not os.path.isfile(pretrained)
        file = weights_file(clip_model, pretrained)
        load_weights(tower.to_empty(device="cpu"), _tower_weights(file, is_fetched), file)
    set_stride(tower, stride)
    return tower.float().eval().requires_grad_(False)


def set_stride(tower: ModifiedResNet, stride: int) -> None:
    """Give a tower's features a finer grid: the last stages no longer pool, and their filters are dilated.

    The dilated filters cover the same area as before, so weights trained at stride 32 still fit (as in
    DeepLab).
    """
    if stride not in (4, 8, 16, STRIDE):
        raise TokenizerError(f"`stride` is {stride}: 32, the towers' own, or 16, 8 or 4")
    dilation = 1
    for stage, own in ((tower.layer2, 8), (tower.layer3, 16), (tower.layer4, 32)):
        for index, block in enumerate(stage):
            block.conv2.dilation = block.conv2.padding = (dilation, dilation)
            if index == 0 and own > stride:
                block.avgpool = block.downsample[0] = nn.Identity()
                dilation *= 2


def weights_file(clip_model: str | Mapping[str, Any], pretrained: str) -> str:
    """The local file of a tower's weights, fetched into open_clip's cache if it is not there."""
    if os.path.isfile(pretrained):
        return pretrained
    from open_clip.pretrained import download_pretrained, get_pretrained_cfg, list_pretrained_tags_by_model

    tags = list_pretrained_tags_by_model(clip_model) if isinstance(clip_model, str) else []
    if pretrained not in tags:
        raise TokenizerError(
            f"pretrained='{pretrained}' is neither a file nor a tag of {clip_model} in open_clip, which has "
            f"{', '.join(tags) or 'none'}: {REMEDY}"
        )
    cache = os.path.expanduser("~/.cache/clip")  # open_clip's default, named here for the lock
    os.makedirs(cache, exist_ok=True)
    source = get_pretrained_cfg(clip_model, pretrained)
    try:
        with shared_lock(Path(cache, f"{clip_model}-{pretrained}.lock")), limited_silence():
            url = source.get("url", "")
            if not os.path.isfile(os.path.join(cache, os.path.basename(url))):
                print_to_user(f"fetching the '{pretrained}' weights of {clip_model} {url}")
            # From the publisher's address: open_clip verifies the checksums of these files.
            return download_pretrained(source, prefer_hf_hub=False, cache_dir=cache)
    except Exception as error:  # the remedy is the same for all errors
        raise TokenizerError(
            f"could not download the '{pretrained}' weights of {clip_model} ({reason_of(error)[:160]}): "
            f"check the network, {REMEDY}"
        ) from None


def is_torchscript(file: str) -> bool:
    """True if a file is what `torch.jit.save` writes: a zip archive with code or constants."""
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _bare_tower(config: Mapping[str, Any]) -> ModifiedResNet:
    from open_clip.modified_resnet import ModifiedResNet

    tower = ModifiedResNet(**config)
    tower.attnpool = nn.Identity()
    return tower


def _random_tower(config: Mapping[str, Any], type: str, seed: int = 0) -> ModifiedResNet:
    if type != "random":
        raise TokenizerError("option `pretrained` as a dict is dict(type='random', seed=<int>)")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tower = _bare_tower(config)
        for name, module in tower.named_modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            elif name.startswith("layer") and name.endswith(".bn3"):
                # open_clip initialises residual branches to zero for training; a fixed encoder needs them.
                nn.init.constant_(module.weight, 0.5)
    return tower


def _tower_weights(file: str, is_fetched: bool) -> dict[str, Tensor]:
    """The weights of the tower alone, from a file that has it alone or inside a model.

    Files that open_clip has fetched may be TorchScript archives, as OpenAI's are. To load one runs its code,
    which can write files, so no other file is loaded in this way.
    """
    if not is_torchscript(file):
        weights = read_weights(file)
    elif is_fetched:
        weights = torch.jit.load(file, map_location="cpu").state_dict()
    else:
        raise TokenizerError(
            f"weights file `{file}` is a TorchScript archive, which can run code when it is loaded: give a "
            "tag of open_clip (OpenAI's files are looked for in ~/.cache/clip), or save its state dict"
        )
    prefixes = sorted({name.partition("visual.")[0] + "visual." for name in weights if "visual." in name})
    if len(prefixes) > 1:  # for example one that follows by momentum
        names = ", ".join(f"`{prefix}`" for prefix in prefixes)
        raise TokenizerError(f"weights file `{file}` has {len(prefixes)} towers ({names}): save one alone")
    prefix = prefixes[0] if prefixes else ""  # of a tower alone
    return {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}
