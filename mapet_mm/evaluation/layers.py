"""The layers of a backbone among its modules, by what each of them takes and gives in a trial pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

# Images of noise among which learned tokens, the same for all of them, are told from patches.
NOISE_IMAGES = 8


class Call(NamedTuple):
    """A module that ran: the first tensor that it took, the first that it gave, and how many it gave."""

    module: nn.Module
    tokens: Tensor
    output: Tensor
    given: int


def find_layers(
    model: nn.Module, calls: Sequence[Call], widths: Collection[int]
) -> tuple[list[nn.Module], nn.Module | None]:
    """The layers of a ViT among the modules that ran, and the norm of the last one's tokens.

    The layers are the longest list of modules that ran once each and gave tokens of the same shape; there are
    none if others of another shape follow, as in a backbone of several stages, or if these tokens are no
    images' whole features.

    Args:
        model: the model.
        calls: of its modules, in order, on `NOISE_IMAGES` images.
        widths: sizes of what the backbone gave, among which is its width.
    """
    shapes: dict[nn.Module, list[tuple[int, ...]]] = {}
    for call in calls:
        shapes.setdefault(call.module, []).append(tuple(call.output.shape))
    lists = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and _is_uniform(list(module), shapes)
    }
    outer = [
        found for name, found in lists.items() if not any(name.startswith(f"{other}.") for other in lists)
    ]
    if not outer:
        return [], None
    layers = max(outer, key=len)
    order = {call.module: place for place, call in enumerate(calls)}
    last = order[layers[-1]]
    if any(order[found[-1]] > last and shapes[found[-1]] != shapes[layers[-1]] for found in outer):
        return [], None
    norms = (
        call.module for call in calls[last + 1 :] if call.tokens is calls[last].output and _is_norm(call)
    )
    norm = next(norms, None)
    first = next(call for call in calls if call.module is layers[0])
    # A norm of the whole model comes before what projects its features to another width.
    if not _are_features(first, calls[last], widths if norm is None else {calls[last].output.shape[2]}):
        return [], None
    return layers, norm


def _is_uniform(modules: Sequence[nn.Module], shapes: dict[nn.Module, list[tuple[int, ...]]]) -> bool:
    found = [shapes.get(module, []) for module in modules]
    return bool(found) and len(found[0]) == 1 and len(found[0][0]) == 3 and all(s == found[0] for s in found)


def _are_features(first: Call, last: Call, widths: Collection[int]) -> bool:
    """Whether layers keep the images and tokens that they take, and give them in the backbone's own width.

    Others are parts of a block, such as its MLP, or one of several streams, such as the pixels of each patch.
    """
    images, tokens, width = last.output.shape
    same = images == NOISE_IMAGES and first.tokens.shape[:2] == (images, tokens)
    return same and last.given == 1 and width in widths


def _is_norm(call: Call) -> bool:
    weights = list(call.module.parameters())
    same = call.output.shape == call.tokens.shape
    return same and bool(weights) and all(weight.ndim == 1 for weight in weights)


@contextmanager
def watching(
    modules: Iterable[nn.Module], see: Callable[[nn.Module, Tensor, Tensor, int], None]
) -> Iterator[None]:
    """Show each call of the modules that takes and gives tensors, as it ends: as `Call` has it."""

    def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        given = output if isinstance(output, list | tuple) else [output]
        if tensors and given and isinstance(given[0], Tensor):
            see(module, tensors[0], given[0], sum(isinstance(one, Tensor) for one in given))

    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
