"""What a training step does, counted without a GPU: waits of the host, operations, bytes and peak memory.

Operations are PyTorch's, as they reach a device: about one kernel each. With `FakeTensorMode` they have true
sizes and compute nothing.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmpretrain.structures import DataSample
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mapet_mm.datasets.transforms.masking import BlockwiseMask
from mapet_mm.models.backbones import two_stream_vit
from mapet_mm.models.heads import token_prediction_head
from mapet_mm.models.losses import linear_cross_entropy
from mapet_mm.models.target_generators import precomputed_tokens
from mapet_mm.models.utils import attention, two_stream
from mapet_mm.registry import MODELS

aten = torch.ops.aten
# Operations whose result the host reads: a value, or how many rows there are.
READS = {
    aten._local_scalar_dense,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.bincount,
}
# Operations that start no kernel.
NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
OPTIMIZERS = {aten._fused_adamw_, aten._fused_adam_, aten._fused_sgd_}
LOADER, CLIP_AND_GUARD, OPTIMIZER = "loader", "clip and guard", "optimizer"


class StepCounts(TorchDispatchMode):
    """Counts, by the phase that is set, what runs in this context.

    Attributes:
        phase: name of the part of the step that runs; a fused optimizer begins its own.
        waits: how often the host waited for a value of the device, or for a copy.
        operations: those that are no views.
        kinds: the same by their names, such as `_to_copy` (a cast), `copy_` and `slice_backward`.
        moved: bytes that the operations read and write, each operand once.
        peak: bytes in use at most, of those that were made in the context or passed to `track`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = LOADER
        self.waits: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.moved = self.in_use = self.peak = 0
        self._storages: dict[int, int] = {}
        self._copies = _CopiesToHost(self)

    def __enter__(self) -> StepCounts:
        self._copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._copies.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "prim":  # a tensor without values is asked for its device
            return result
        packet = function.overloadpacket
        if packet in OPTIMIZERS:
            self.phase = OPTIMIZER
        if (
            packet in READS
            or indexes_with_mask(packet, args)
            or is_blocking_copy(packet, args, kwargs, result)
        ):
            self.waits[self.phase] += 1
        results = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        if not function.is_view and packet not in NO_KERNEL:
            self.operations[self.phase] += 1
            self.kinds[packet.__name__] += 1
            operands = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
            self.moved += sum(one.numel() * one.element_size() for one in (*operands, *results))
        for one in results:
            self.track(one)
        return result

    def track(self, tensor: Tensor) -> None:
        """Count a tensor's memory as in use until nobody holds it."""
        storage = tensor.untyped_storage()
        if id(storage) not in self._storages:
            self._storages[id(storage)] = storage.nbytes()
            self.in_use += storage.nbytes()
            self.peak = max(self.peak, self.in_use)
            weakref.finalize(storage, self._free, id(storage))

    def _free(self, key: int) -> None:
        self.in_use -= self._storages.pop(key)


class _CopiesToHost(TorchFunctionMode):
    """Counts copies to the host that are no operation where the tensor is there already."""

    def __init__(self, counts: StepCounts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None):
        if function in (Tensor.tolist, Tensor.cpu):
            self.counts.waits[self.counts.phase] += 1
        return function(*args, **(kwargs or {}))


def indexes_with_mask(packet: Any, args: tuple) -> bool:
    """True for an index by a mask, whose number of rows the host has to know."""
    if packet not in (aten.index, aten.index_put, aten.index_put_):
        return False
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def is_blocking_copy(packet: Any, args: tuple, kwargs: dict | None, result: Any) -> bool:
    """True for a copy between host and device for which the host waits."""
    options = kwargs or {}
    if packet is aten._to_copy:
        source, non_blocking = args[0], options.get("non_blocking", False)
    elif packet is aten.copy_:
        source, non_blocking = args[1], options.get("non_blocking", args[2:3] == (True,))
    else:
        return False
    return source.device != result.device and not non_blocking


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Within this context a CPU computes as a GPU: its attention and blocks, and no values are looked at."""
    with (
        patch.object(precomputed_tokens, "should_check_values", lambda *_: False),
        patch.object(token_prediction_head, "should_check_values", lambda *_: False),
        patch.object(two_stream_vit, "should_check_values", lambda *_: False),
        patch.object(attention, "uses_bmm", lambda *_: False),
        patch.object(two_stream, "uses_bmm", lambda *_: False),
        patch.dict(linear_cross_entropy.BLOCK_ELEMENTS, clear=True),
    ):
        yield


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Within this context new tensors are on a GPU and have no values."""
    make_tensor = torch.tensor

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:  # only a GPU's driver pins
        return make_tensor(*args, **kwargs)

    with (
        patch("torch.tensor", unpinned),
        patch("torch.Tensor.pin_memory", lambda tensor: tensor),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.device("cuda"),
    ):
        yield


def build_step(cfg: Config, batch: int) -> tuple[nn.Module, Callable[[StepCounts], None]]:
    """A recipe's model, and its training step in bfloat16 on images and tokens that are there already."""
    init_default_scope("mmpretrain")
    model = MODELS.build(cfg.model).train()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], fused=True)
    side = cfg.model.backbone.img_size // cfg.model.backbone.patch_size
    images = torch.zeros(batch, 3, cfg.model.backbone.img_size, cfg.model.backbone.img_size)
    tokens = torch.zeros(batch, side, side, dtype=torch.int64)
    num_masked = (cfg.model.get("neck") or {}).get("mask_tokens_num", 75)  # CAE's, or BEiT's
    masks = BlockwiseMask((side, side), num_masked)
    samples = [DataSample(mask=torch.as_tensor(masks({})["mask"])) for _ in range(batch)]

    def step(counts: StepCounts) -> None:
        counts.phase = "forward"
        with torch.autocast("cpu", torch.bfloat16):
            losses = model.loss([images, tokens], samples)
        counts.phase = "backward"
        losses["loss"].backward()
        counts.phase = CLIP_AND_GUARD
        nn.utils.clip_grad_norm_(model.parameters(), 3.0, foreach=True)  # also without values
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def build_labelled_step(cfg: Config, batch: int) -> tuple[nn.Module, Callable[[StepCounts], None]]:
    """A classifier's or a segmentor's model, and its training step in bfloat16 on what a loader gives."""
    init_default_scope(cfg.default_scope)
    cfg.model.setdefault("data_preprocessor", cfg.get("data_preprocessor"))
    cfg.model.backbone.init_cfg = None
    model = MODELS.build(cfg.model).train()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], fused=True)
    images = torch.zeros(batch, 3, cfg.model.backbone.img_size, cfg.model.backbone.img_size)

    def loaded() -> dict:
        if cfg.default_scope == "mmseg":
            return dict(inputs=list(images), data_samples=[labelled_pixels(image) for image in images])
        return dict(inputs=images, data_samples=[DataSample().set_gt_label(0) for _ in images])

    def step(counts: StepCounts) -> None:
        data = loaded()
        counts.phase = "preprocessor"
        data = model.data_preprocessor(data, training=True)
        counts.phase = "forward"
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = model.parse_losses(model(**data, mode="loss"))
        counts.phase = "backward"
        loss.backward()
        counts.phase = CLIP_AND_GUARD
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def labelled_pixels(image: Tensor) -> Any:
    """MMSegmentation's data sample of an image, all pixels of one class."""
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    sample = SegDataSample(metainfo=dict(img_shape=image.shape[-2:]))
    sample.gt_sem_seg = PixelData(data=torch.zeros(1, *image.shape[-2:], dtype=torch.int64))
    return sample


def count_step(cfg: Config, batch: int) -> StepCounts:
    """The second step of a recipe, with its model, gradients and moments in use; as on a GPU."""
    build = build_step if "target_generator" in cfg.model else build_labelled_step
    with as_on_a_gpu(), StepCounts() as counts:
        model, step = build(cfg, batch)
        for one in (*model.parameters(), *model.buffers()):
            counts.track(one)
        step(counts)  # makes the moments
        counts.operations.clear()
        counts.kinds.clear()
        counts.waits.clear()
        counts.moved = 0
        counts.peak = counts.in_use
        step(counts)
    return counts
