"""Tokens of every layer of any backbone, found by a look at what it computes and not by its class."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from mmpretrain.models.selfsup.base import BaseSelfSupervisor
from torch import Tensor, nn

from mapet_mm.evaluation.image_features import normalise
from mapet_mm.evaluation.layers import NOISE_IMAGES, Call, find_layers, watching
from mapet_mm.utils.errors import UserError

# Tokens that may stand beside the patches in what a backbone gives last.
MOST_OTHERS = 32
# By which factor a grid of patches may be longer or wider than the image, where no map says its shape.
MOST_OBLONG = 1.5


class BackboneError(UserError):
    """A model of which no features can be taken, or not of these images."""


class LayerTokens(NamedTuple):
    """What a backbone gives of a batch.

    Args:
        class_token: of each layer `(B, L, D)`; None if the backbone has none.
        patches: of each layer `(B, N, D)`, in raster order; none where its features are vectors.
        grid: (H, W) of the patches.
    """

    class_token: Float[Tensor, "batch layer dim"] | None
    patches: Sequence[Float[Tensor, "batch patch dim"]]
    grid: tuple[int, int]


class TokenBackbone:
    """A model's backbone as a giver of tokens.

    Its layers are the longest list of modules that all give tokens of the same shape `(B, N, D)`, one for
    each token that they take, in the width of the backbone's own output. If the backbone normalises the last
    layer's tokens, the normalised ones come last, as "output"; the numbered layers' have no norm. A backbone
    of stages of several widths, or without such a list, has one layer, "output": what it gives last.

    Args:
        model: MaPeT, or any pre-training, classifier or backbone of MMPretrain, timm's and Hugging Face's
            through its wrappers; in evaluation mode.
        preprocessor: data preprocessor with mean and standard deviation; the model's own by default.
        missing: names of weights that no checkpoint gave, and are NaN.

    Raises:
        BackboneError: when it is first used: it takes no such images, or gives no features.
    """

    def __init__(
        self, model: nn.Module, preprocessor: nn.Module | None = None, missing: Sequence[str] = ()
    ) -> None:
        self.model, self.missing = model, list(missing)
        self.preprocessor = preprocessor or getattr(model, "data_preprocessor", None)
        self._run = _features_of(model)
        self._looked_at: tuple[int, ...] | None = None  # (C, H, W)
        self._modules: list[nn.Module] = []
        self.layers: list[str] = []  # "1", "2", ..., "output"
        self.grid = (0, 0)
        self.prefix = 0  # tokens before the patches
        self._channels_first = False  # what it gives last is `(B, D, N)`
        self.has_class_token = False

    @property
    def device(self) -> torch.device:
        """Where the model is; the CPU for one without parameters."""
        return next(self.model.parameters(), torch.empty(0)).device

    def normalise(self, images: Tensor | Sequence[Tensor]) -> Float[Tensor, "batch 3 height width"]:
        """Images of a pipeline as the model wants them, on its device."""
        return normalise(self.preprocessor, images, self.device)

    def __call__(self, images: Float[Tensor, "batch channel height width"]) -> LayerTokens:
        """Tokens of each layer, of normalised images."""
        if tuple(images.shape[1:]) != self._looked_at:
            self.look(images)
        if self._modules:
            outputs: dict[nn.Module, Tensor] = {}
            with watching(self._modules, lambda module, _, output, __: outputs.__setitem__(module, output)):
                self._forward(images)
            tokens = [outputs[module] for module in self._modules]
        else:
            last = self._last_output(images)[0]
            tokens = [last.mT if self._channels_first else last]
        if any(len(one) != len(images) for one in tokens):
            raise BackboneError(
                f"the backbone gives {len(tokens[0])} features of {len(images)} images: none are taken of it"
            )
        class_token = torch.stack([one[:, 0] for one in tokens], 1) if self.has_class_token else None
        return LayerTokens(class_token, [one[:, self.prefix :] for one in tokens], self.grid)

    @torch.no_grad()
    def look(self, images: Float[Tensor, "batch channel height width"]) -> None:
        """Find the layers, the tokens before the patches and the grid, for images of this size and kind."""
        # Whole numbers up to the largest value suit images and grids of token ids.
        highest = max(2, int(images.max()) + 1)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randint(highest, (NOISE_IMAGES, *images.shape[1:]), generator=generator).to(images)
        calls: list[Call] = []
        with watching(self.model.modules(), lambda *call: calls.append(Call(*call))):
            output = self._forward(noise)
        widths = {size for one in _tensors(output) for size in one.shape[1:]}
        layers, norm = find_layers(self.model, calls, widths)
        self._modules = [*layers, *([] if norm is None else [norm])]
        self.layers = [str(number) for number in range(1, len(layers) + 1)]
        if norm is not None or not layers:
            self.layers.append("output")
        entry = next((place for place, call in enumerate(calls) if call.module in layers), len(calls))
        before = [noise, *(call.output for call in calls[:entry])]
        shapes = [one.shape for one in before if one.ndim == 4 and len(one) == NOISE_IMAGES]
        if layers:
            maps = [tuple(shape[2:]) for shape in shapes]
            self.prefix = _learned_tokens(calls[entry].tokens)
            self.grid = _grid(calls[entry].tokens.shape[1] - self.prefix, maps)
        else:
            self._look_at_last(noise, shapes)
        # timm's registers may stand where a class token would.
        named = [getattr(module, "has_class_token", None) for module in self.model.modules()]
        self.has_class_token = self.prefix > 0 and False not in named
        self._looked_at = tuple(images.shape[1:])
        self._check(noise)

    def _look_at_last(self, noise: Tensor, shapes: Sequence[torch.Size]) -> None:
        """Find axes and grid of what the backbone gives last, by the shapes of all maps on the way."""
        tokens, own = self._last_output(noise)
        count, width = tokens.shape[1:]
        # As a map of `width` places and `count` channels that was only flattened.
        self._channels_first = (
            own is None
            and count != width
            and any(shape[1] == count and math.prod(shape[2:]) == width for shape in shapes)
        )
        count = width if self._channels_first else count
        maps = [own] if own else [tuple(shape[2:]) for shape in shapes]
        # A vector is a class token; other tokens may have joined the patches on the way.
        others = [count - math.prod(size) for size in maps]
        self.prefix = min((number for number in others if 0 <= number <= MOST_OTHERS), default=0)
        self.grid = own or _grid(count - self.prefix, maps)

    def _check(self, images: Tensor) -> None:
        first, again = (
            [one for one in (tokens.class_token, *tokens.patches) if one is not None]
            for tokens in (self(images), self(images))
        )
        if self.missing and not all(tokens.isfinite().all() for tokens in first):
            raise BackboneError(
                f"the checkpoint has no `{self.missing[0]}` in the config's shape ({len(self.missing)} "
                "weights of the backbone are missing): name the config that it was trained with"
            )
        if not all(torch.allclose(*both, rtol=0.01, atol=0.01) for both in zip(first, again, strict=True)):
            raise BackboneError(
                "the backbone gives other features each time (it masks or permutes at random): give the "
                "config of the whole pre-training model, or a backbone for downstream tasks"
            )

    def _forward(self, images: Tensor) -> Any:
        try:
            return self._run(images)
        except (AssertionError, RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            height, width = images.shape[-2:]
            reason = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise BackboneError(
                f"the backbone does not take images of {height} x {width} pixels ({reason}): let the "
                "data's pipeline make the size that it was built for"
            ) from error

    def _last_output(self, images: Tensor) -> tuple[Float[Tensor, "batch token dim"], tuple[int, int] | None]:
        """What a backbone without a list of layers gives last, tokens or a vector as one; a map's (H, W)."""
        output = self._forward(images)
        if isinstance(output, list | tuple) and output:  # of several stages
            output = output[-1]
        while isinstance(output, list | tuple) and len(output) == 1:
            output = output[0]
        output = getattr(output, "last_hidden_state", output)
        if not isinstance(output, Tensor) or not 2 <= output.ndim <= 4:
            what = type(output).__name__ + (f" of {len(output)}" if isinstance(output, list | tuple) else "")
            raise BackboneError(f"the backbone gives {what}, of which no features are taken")
        if output.ndim == 4:
            error = partial(_aspect_error, ratio=images.shape[-2] / images.shape[-1])
            if error(output.shape[1:3]) < error(output.shape[2:]):
                output = output.permute(0, 3, 1, 2)  # B H W D -> B D H W
            return output.flatten(2).mT, tuple(output.shape[2:])
        return (output[:, None], (0, 0)) if output.ndim == 2 else (output, None)


def _tensors(output: Any) -> list[Tensor]:
    """The tensors that a backbone gives, of all its stages."""
    output = getattr(output, "last_hidden_state", output)
    if isinstance(output, list | tuple | Mapping):
        parts = output.values() if isinstance(output, Mapping) else output
        return [tensor for one in parts for tensor in _tensors(one)]
    return [output] if isinstance(output, Tensor) else []


def _learned_tokens(tokens: Float[Tensor, "image token dim"]) -> int:
    """How many tokens at the start are the same in all images."""
    same = (tokens == tokens[:1]).all(dim=2).all(dim=0)  # N
    return int(same.int().cumprod(0).sum())


def _grid(patches: int, maps: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(H, W) of the last map of so many places, else the one that is most like the first map, the image.

    Raises:
        BackboneError: so many patches make no grid that is like the image.
    """
    known = [size for size in maps if size[0] * size[1] == patches]
    sizes = known or [(h, patches // h) for h in range(1, patches + 1) if patches % h == 0]
    error = partial(_aspect_error, ratio=maps[0][0] / maps[0][1])
    best = min(reversed(sizes), key=error)
    if not known and error(best) > math.log(MOST_OBLONG):
        raise BackboneError(
            f"the backbone gives {patches} tokens of {maps[0][0]} x {maps[0][1]} pixels, which are no grid "
            "of patches: no features are taken of it"
        )
    return best


def _aspect_error(size: Sequence[int], ratio: float) -> float:
    return abs(math.log(size[0] / size[1] / ratio))


def _features_of(model: nn.Module) -> Callable[[Tensor], Any]:
    """The function of a model that runs its backbone, and no neck, on images."""
    bases = (module.base_model for module in model.modules() if hasattr(module, "base_model"))
    if (base := next(bases, None)) is not None:  # Hugging Face's, whose wrapper has no features
        return base
    if not hasattr(model, "extract_feat"):
        return model
    if _has_stages(model):
        return partial(model.extract_feat, stage="backbone")
    return model.backbone if runs_a_neck(model) else model.extract_feat


def runs_a_neck(model: nn.Module) -> bool:
    """Whether a model's `extract_feat` is more than its backbone, as that of a segmentor with a neck."""
    # A pre-training's runs the backbone alone, without a mask; its neck is for the loss.
    parts = [getattr(model, name, None) for name in ("backbone", "neck")]
    whole = isinstance(model, BaseSelfSupervisor) or not hasattr(model, "extract_feat") or _has_stages(model)
    return not whole and all(isinstance(part, nn.Module) for part in parts)


def _has_stages(model: nn.Module) -> bool:
    """Whether `extract_feat` stops behind the backbone if told to, as that of MMPretrain's classifier."""
    return "stage" in inspect.signature(model.extract_feat).parameters
