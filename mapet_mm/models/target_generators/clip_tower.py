"""The visual tower of a CLIP ResNet without the text tower: open_clip's architecture, any weights."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from torch import Tensor, nn

from mapet_mm.registry import MODELS
from mapet_mm.utils.errors import UserError, reason_of
from mapet_mm.weight_files import WeightFileError, non_finite, read_weights

if TYPE_CHECKING:  # open_clip is imported only where a tower is built
    from open_clip.modified_resnet import ModifiedResNet

# Stem (two strides), then three stages with a stride each.
STRIDE = 32
WEIGHTS_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")


class TowerError(UserError, ValueError):
    """A tower cannot be built or loaded; the message is one line that says what to do."""


def tower_config(clip_model: str | Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of open_clip's `ModifiedResNet` for a model name, or for a dict of a small architecture.

    Args:
        clip_model: a CLIP ResNet that open_clip knows ('RN50x64'), or `dict(layers, width, image_size)` with,
            optionally, `head_width` (64) and `output_dim` (those of the attention pooling, not used here).

    Raises:
        TowerError: the name is unknown, or the model's visual tower is not a ResNet.
    """
    if isinstance(clip_model, str):
        import open_clip

        config = open_clip.get_model_config(clip_model)
        vision = dict(config["vision_cfg"]) if config else {}
        if not _is_resnet(vision):
            reason = "has no ResNet tower" if config else "is not a model of open_clip"
            raise TowerError(
                f"clip_model '{clip_model}' {reason}: choose one of {', '.join(_resnet_names())}, "
                "or give a dict with layers, width and image_size"
            )
        vision["output_dim"] = config["embed_dim"]
    else:
        vision = dict(clip_model)
        if missing := {"layers", "width", "image_size"} - vision.keys():
            raise TowerError(f"clip_model given as a dict lacks {', '.join(sorted(missing))}")
    width = vision["width"]
    return {
        "layers": list(vision["layers"]),
        "width": width,
        "image_size": vision["image_size"],
        "heads": max(1, width * 32 // vision.get("head_width", 64)),
        "output_dim": vision.get("output_dim", width * 32),
    }


@MODELS.register_module(name="OpenCLIPVisual")
def build_visual(
    clip_model: str | Mapping[str, Any] = "RN50x64",
    pretrained: str | Mapping[str, Any] = "openai",
    stride: int | None = None,
) -> nn.Module:
    """The image tower of any open_clip model: a ResNet from `build_tower`, others unchanged.

    Args:
        clip_model: a name that open_clip knows, or a dict for a small ResNet (see `tower_config`).
        pretrained: a weights tag or a local weights file; for a ResNet see `build_tower`.
        stride: of a ResNet, see `build_tower`; others have a fixed one.

    Raises:
        TowerError: no such model or weights, or a stride for a model that is not a ResNet.
    """
    import open_clip

    config = open_clip.get_model_config(clip_model) if isinstance(clip_model, str) else None
    if config is None or _is_resnet(config["vision_cfg"]):
        return build_tower(clip_model, pretrained, stride or STRIDE)
    if stride is not None:
        raise TowerError(f"`stride` is {stride}, but only ResNets take one: leave it out for {clip_model}")
    try:
        model = open_clip.create_model(clip_model, pretrained=pretrained)
    except Exception as error:  # the remedy is the same for all errors
        raise TowerError(
            f"could not build {clip_model} with weights '{pretrained}' ({reason_of(error)[:160]}): "
            "give a tag of open_clip or a local weights file"
        ) from None
    return model.visual.float().eval().requires_grad_(False)


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
        TowerError: the weights are unknown, cannot be fetched, belong to another architecture or are not
            finite; or the stride is not supported.
    """
    config = tower_config(clip_model)
    if pretrained == "random" or isinstance(pretrained, Mapping):
        tower = _random_tower(config, {} if isinstance(pretrained, str) else dict(pretrained))
    else:
        # Built without storage, then given the loaded tensors: half the memory and no initialisation.
        with torch.device("meta"):
            tower = _bare_tower(config)
        _load(tower, weights_file(clip_model, pretrained))
    set_stride(tower, stride)
    return tower.float().eval().requires_grad_(False)


def set_stride(tower: ModifiedResNet, stride: int) -> None:
    """Give a tower's features a finer grid: the last stages no longer pool, and their filters are dilated.

    The dilated filters cover the same area as before, so weights trained at stride 32 still fit (as in
    DeepLab).

    Raises:
        TowerError: no number of unpooled stages gives this stride.
    """
    if stride not in (4, 8, 16, STRIDE):
        raise TowerError(f"`stride` is {stride}: 32, the towers' own, or 16, 8 or 4")
    dilation = 1
    for stage, own in ((tower.layer2, 8), (tower.layer3, 16), (tower.layer4, 32)):
        for index, block in enumerate(stage):
            block.conv2.dilation = block.conv2.padding = (dilation, dilation)
            if index == 0 and own > stride:
                block.avgpool = block.downsample[0] = nn.Identity()
                dilation *= 2


def weights_digest(tower: nn.Module) -> str:
    """SHA-256 (hexadecimal) of all floating-point weights and statistics, in the order of their names."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tower.state_dict().items()):
        if tensor.is_floating_point():
            sha.update(f"{name}{tuple(tensor.shape)}".encode())
            sha.update(tensor.detach().cpu().contiguous().numpy())
    return sha.hexdigest()


def describe(
    clip_model: str | Mapping[str, Any], pretrained: str | Mapping[str, Any], stride: int = STRIDE
) -> dict[str, str]:
    """Description of encoder and weights for a codebook's metadata (of a weights file only the name)."""
    if isinstance(clip_model, str):
        encoder = clip_model
    else:
        layers = "-".join(map(str, clip_model["layers"]))
        encoder = f"ModifiedResNet-{layers}-width{clip_model['width']}"
    if stride != STRIDE:
        encoder += f" with stride {stride}"
    if pretrained == "random" or isinstance(pretrained, Mapping):
        seed = 0 if isinstance(pretrained, str) else pretrained.get("seed", 0)
        return {"encoder": encoder, "weights": f"random, seed {seed}"}
    return {"encoder": encoder, "weights": os.path.basename(pretrained)}


def _is_resnet(vision: Mapping[str, Any]) -> bool:
    return isinstance(vision.get("layers"), list) and "timm_model_name" not in vision


def _resnet_names() -> list[str]:
    import open_clip

    return [name for name in open_clip.list_models() if name.startswith("RN")]


def _bare_tower(config: Mapping[str, Any]) -> ModifiedResNet:
    from open_clip.modified_resnet import ModifiedResNet

    tower = ModifiedResNet(**config)
    tower.attnpool = nn.Identity()
    return tower


def _random_tower(config: Mapping[str, Any], options: dict[str, Any]) -> ModifiedResNet:
    seed = options.pop("seed", 0)
    if options.pop("type", "random") != "random" or options:
        raise TowerError("option `pretrained` as a dict is dict(type='random', seed=<int>) and nothing else")
    from open_clip.modified_resnet import Bottleneck

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tower = _bare_tower(config)
        for module in tower.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            elif isinstance(module, Bottleneck):
                # open_clip initialises residual branches to zero for training; a fixed encoder needs them.
                nn.init.constant_(module.bn3.weight, 0.5)
    return tower


def weights_file(clip_model: str | Mapping[str, Any], pretrained: str) -> str:
    """The local file of a tower's weights, fetched into open_clip's cache if it is not there.

    Raises:
        TowerError: there are no such weights, or they cannot be fetched.
    """
    options = (
        "give a local weights file (pretrained='/path/to/weights.pt' or .safetensors), or try it with "
        "random weights: tokenizer=dict(_delete_=True, type='mapet_mm.KCLIP', codebook=..., clip_model=dict("
        "layers=[1, 1, 1, 1], width=8, image_size=448), pretrained=dict(type='random', seed=0))"
    )
    if os.path.isfile(pretrained):
        return pretrained
    if os.sep in pretrained or pretrained.endswith(WEIGHTS_SUFFIXES):
        raise TowerError(f"weights file `{pretrained}` (option `pretrained`) does not exist: {options}")
    from open_clip.pretrained import list_pretrained_tags_by_model

    tags = list_pretrained_tags_by_model(clip_model) if isinstance(clip_model, str) else []
    if pretrained not in tags:
        known = f"open_clip has {', '.join(tags)}" if tags else "it has none in open_clip"
        raise TowerError(
            f"no weights '{pretrained}' for {describe(clip_model, '')['encoder']}: {known}; {options}"
        )
    try:
        return _download(clip_model, pretrained)
    except Exception as error:  # the remedy is the same for all errors
        reason = str(error).split("\n", 1)[0][:160]
        raise TowerError(
            f"could not download the '{pretrained}' weights of {clip_model} "
            f"({type(error).__name__}: {reason}): check the network, {options}"
        ) from None


def _download(clip_model: str, tag: str) -> str:
    """Download into open_clip's cache, in one process of all that share it, and return the file."""
    from open_clip.pretrained import download_pretrained, get_pretrained_cfg

    cache = os.path.expanduser("~/.cache/clip")  # open_clip's default, named here for the lock
    os.makedirs(cache, exist_ok=True)
    with FileLock(os.path.join(cache, f"{clip_model}-{tag}.lock")):
        # From the publisher's address: open_clip verifies the checksums of these files.
        return download_pretrained(get_pretrained_cfg(clip_model, tag), prefer_hf_hub=False, cache_dir=cache)


def _load(tower: ModifiedResNet, file: str) -> None:
    weights = _tower_weights(_read_state_dict(file))
    # Files with only the tower may lack the counters that training updates.
    for name, tensor in tower.state_dict().items():
        if name.endswith("num_batches_tracked") and name not in weights:
            weights[name] = torch.zeros((), dtype=tensor.dtype)
    try:
        tower.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        problems = [line.strip() for line in str(error).split("\n")[1:]]
        raise TowerError(
            f"weights file `{file}` does not fit the tower's architecture ({len(weights)} tensors; "
            f"{problems[0][:160]}): check clip_model and pretrained"
        ) from None
    if name := non_finite(tower):
        raise TowerError(
            f"weights file `{file}` holds NaN or infinity, in `{name}` first: its training diverged; give "
            "another by `pretrained`"
        )


def _read_state_dict(file: str) -> Mapping[str, Tensor]:
    with contextlib.suppress(Exception):  # OpenAI's own files are TorchScript archives
        return torch.jit.load(file, map_location="cpu").state_dict()
    try:
        return read_weights(file)
    except WeightFileError as error:
        raise TowerError(
            f"weights file `{file}` is truncated or holds no state dict ({error}): fetch it again"
        ) from None


def _tower_weights(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}
    # The tower of a whole CLIP, at whatever place of the model that was saved.
    whole = {name.partition("visual.")[2]: tensor for name, tensor in weights.items() if "visual." in name}
    weights = whole or weights
    return {name: tensor for name, tensor in weights.items() if not name.startswith("attnpool.")}
