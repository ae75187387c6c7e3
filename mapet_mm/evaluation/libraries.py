"""Models of timm and Hugging Face, and how they take images, as their library states it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.utils import GatedRepoError, RepositoryNotFoundError
from mmengine.utils import to_2tuple, to_3tuple
from torch import nn

from mapet_mm.dependencies import EXTRAS
from mapet_mm.evaluation.weights import fill_missing
from mapet_mm.interop.description import INTERPOLATIONS, Preparation
from mapet_mm.utils.dist import print_to_user
from mapet_mm.utils.errors import UserError, reason_of
from mapet_mm.weight_files import only_safe_globals, require_answer

# Image processors of Hugging Face whose settings say all that they do; and those of them that resize to more
# than `size`, with the share of it that their crop has.
PROCESSORS = (
    *("ViT", "DeiT", "Beit", "Bit", "CLIP", "Siglip", "DINOv3ViT", "ChineseCLIP", "Blip", "Segformer", "Pvt"),
    *("MobileNetV1", "MobileNetV2", "ConvNext", "PoolFormer", "Levit"),
)
ENLARGING = {"ConvNext": 224 / 256, "PoolFormer": 0.9, "Levit": 224 / 256}
LOG_IN = "log in by `hf auth login` (`huggingface-cli login` in older versions), or set HF_TOKEN"


class PreparationError(UserError):
    """A model whose library prepares its images in a way that is not supported here."""


@contextmanager
def one_line(title: str, if_fetched: str, otherwise: str = "") -> Iterator[None]:
    """Load a model by a library, whose errors become one line. Files run no code.

    Args:
        title: the model's name, for the line.
        if_fetched: what to do if the weights could not be fetched.
        otherwise: what to do about other errors than those with a remedy of their own.

    Raises:
        UserError: the line.
    """
    try:
        # These libraries load with PyTorch's list of what a file may hold, to which MMEngine adds `getattr`.
        with only_safe_globals():
            yield
    except PreparationError as error:
        raise UserError(f"{title}: {error}, which is not supported") from error
    except UserError:
        raise
    except Exception as error:  # of an import of the library's, it can be any
        if isinstance(error, ImportError | RuntimeError | AttributeError):
            while error.__cause__ is not None:  # transformers says of a failed import only that it failed
                error = error.__cause__
        met = [error, error.__cause__]
        reason = reason_of(error).rstrip(".")
        remedy = if_fetched if isinstance(error, OSError) else otherwise
        if any(isinstance(one, GatedRepoError) for one in met):
            reason = "the weights are gated, and your account has no access to them"
            remedy = f"accept their terms on the model's page of the Hugging Face Hub, then {LOG_IN}"
        elif any(isinstance(one, RepositoryNotFoundError) for one in met):
            reason = "the Hugging Face Hub has no such model, or a private one"
            remedy = f"check the name; for a private one {LOG_IN}"
        elif isinstance(error, ImportError):
            extra = EXTRAS.get(str(error.name).partition(".")[0])
            remedy = f'pip install "mapet_mm[{extra}]"' if extra else "repair its installation"
        raise UserError("; ".join(filter(None, [f"{title}: {reason}", remedy]))) from error


def find_timm(name: str) -> None:
    """Raise an error unless timm has a model and weights of this name; those on a hub are not looked up."""
    import timm

    source, name = timm.models.parse_model_name(name)
    if source == "local-dir":
        Path(name, "config.json").read_bytes()
    elif not source:
        if not timm.is_model(name):
            raise ValueError(f"timm has no model {name}")
        timm.models.get_pretrained_cfg(name)


def find_hugging_face(name: str) -> None:
    """Raise an error unless there is a model of this name; a folder's or the hub's config says so."""
    import transformers

    if not Path(name).is_dir():
        _reach_hub(f"hf:{name}")
    transformers.AutoConfig.from_pretrained(name)


def timm_model(name: str, with_weights: bool, side: int | None) -> tuple[nn.Module, Preparation, list[str]]:
    """A model of timm, and what its `pretrained_cfg` says."""
    import timm

    if with_weights and not name.startswith("local-dir:"):
        _reach_hub(f"timm:{name}")
    model = timm.create_model(name, pretrained=with_weights)
    if side and hasattr(model, "set_input_size"):  # position embeddings of one size
        model.set_input_size(img_size=side)
    known = timm.data.resolve_model_data_config(model)
    resize, crop = timm.data.create_transform(**known).transforms[:2]
    if type(resize).__name__ != "Resize":
        raise PreparationError(f"images are prepared by {resize} and {crop}")
    prepared = Preparation(
        img_size=tuple(crop.size),
        mean=tuple(known["mean"]),
        std=tuple(known["std"]),
        resize=resized_to(resize.size, tuple(crop.size)),
        interpolation=known["interpolation"],
    )
    return model, prepared, []


def hugging_face_model(
    name: str, with_weights: bool, side: int | None
) -> tuple[nn.Module, Preparation, list[str]]:
    """A model of Hugging Face, what its image processor says, and weights that its files lack, then NaN."""
    import transformers

    if not Path(name).is_dir():
        _reach_hub(f"hf:{name}")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(name)
    if hasattr(config, "mask_ratio"):  # ViTMAE would mask in evaluation, too
        config.mask_ratio = 0.0
    missing = []
    if with_weights:
        model, found = transformers.AutoModel.from_pretrained(name, config=config, output_loading_info=True)
        missing = sorted(found["missing_keys"])
        fill_missing(model, missing)
    else:
        model = transformers.AutoModel.from_config(config)
    # In float32: transformers 5 loads a file of half precision in its own type.
    model = getattr(model, "vision_model", model).float()
    processor = transformers.AutoImageProcessor.from_pretrained(name)
    return model, _processor_preparation(processor.to_dict()), missing


def _processor_preparation(known: Mapping[str, Any]) -> Preparation:
    """What the settings of an image processor of Hugging Face say.

    Raises:
        PreparationError: it prepares images in a way that is not supported here.
    """
    kind = known["image_processor_type"].removesuffix("Fast").removesuffix("Pil")
    kind = kind.removesuffix("ImageProcessor")
    interpolations = {number: title for title, number in INTERPOLATIONS.items()}
    refused = {
        known["image_processor_type"]: kind not in PROCESSORS,
        "do_resize=False": not known.get("do_resize", True),
        "do_pad=True": known.get("do_pad"),
        f"resample={known.get('resample')}": known.get("resample") not in interpolations,
    }
    for setting, is_found in refused.items():
        if is_found:
            raise PreparationError(f"images are prepared by {setting}")

    resize = _processor_resize(kind, known)
    if known.get("do_center_crop"):
        img_size = known["crop_size"]["height"], known["crop_size"]["width"]
    elif kind == "ConvNext":
        img_size = to_2tuple(known["size"]["shortest_edge"])
    elif isinstance(resize, tuple):
        img_size = resize
    else:
        raise PreparationError("images keep their shapes (do_center_crop=False)")

    # Its mean and standard deviation are of values of which the largest is this.
    largest = 1
    if not known.get("do_rescale", True):
        largest = 255
    elif "rescale_factor" in known:
        largest = 255 * known["rescale_factor"]
    mean, std = 0, 1
    if known.get("do_normalize", True):
        mean, std = known["image_mean"], known["image_std"]
    return Preparation(
        img_size=img_size,
        mean=tuple(value / largest for value in to_3tuple(mean)),
        std=tuple(value / largest for value in to_3tuple(std)),
        resize=resized_to(resize, img_size),
        interpolation=interpolations[known["resample"]],
        crop="mapet_mm.CenterCrop",
    )


def _processor_resize(kind: str, known: Mapping[str, Any]) -> int | tuple[int, int]:
    """The short side, or the (height, width), to which an image processor resizes before it crops."""
    size = known["size"]
    if size.keys() == {"height", "width"} and kind not in ENLARGING:
        return size["height"], size["width"]
    if size.keys() != {"shortest_edge"}:
        raise PreparationError(f"images are prepared by size={dict(size)}")
    side = size["shortest_edge"]
    if kind == "ConvNext" and side >= 384:
        return side, side
    if kind in ENLARGING:
        return int(side / (known.get("crop_pct", ENLARGING[kind]) or 1))
    return side


def resized_to(resize: int | Sequence[int], img_size: tuple[int, int]) -> int | tuple[int, int] | None:
    """The `resize` of a `Preparation`, from the short side or the (height, width) before the crop.

    Raises:
        PreparationError: the crop is larger.
    """
    if any(crop > side for crop, side in zip(img_size, to_2tuple(resize), strict=True)):
        raise PreparationError(f"images are resized to {resize} and padded to {img_size}")
    if isinstance(resize, int):
        return resize
    return None if tuple(resize) == img_size else tuple(resize)


def _reach_hub(name: str) -> None:
    """Say that a model comes from Hugging Face's hub or its cache; WeightFileError if the hub is silent."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return
    print_to_user(f"{name}: looked up at {ENDPOINT}, and fetched unless it is in the cache")
    require_answer(ENDPOINT, f"HF_HUB_OFFLINE=1 takes {name} from the cache")


class Library(NamedTuple):
    """A library of models.

    Args:
        find: raises an error unless there is a model of a name; reads no weights.
        load: gives a model, how it takes images, and names of weights that its files lack, then NaN; takes
            its name, whether its weights are read, and the side of images in place of its own.
    """

    find: Callable[[str], None]
    load: Callable[[str, bool, int | None], tuple[nn.Module, Preparation, list[str]]]


LIBRARIES = {"timm": Library(find_timm, timm_model), "hf": Library(find_hugging_face, hugging_face_model)}
