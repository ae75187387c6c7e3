"""A pretended GPU: its tensors have their values in the host's memory, and say that they are on a GPU.

It finds without any GPU what CUDA would refuse, tensors of two devices in one operation and NumPy arrays of a
GPU's tensors, and faults in what the code does only where a model is on a GPU. It has none of CUDA's kernels,
so it says nothing of their rounding, memory or time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch import __future__ as future
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
# What needs a value of the GPU on the host, which waits until everything asked for before is computed.
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
}
# CUDA takes indices from the host.
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}

# What autocast does on CUDA: these functions compute in its precision, those in float32.
F = torch.nn.functional
IN_AUTOCAST = {
    *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d, F.prelu, F.scaled_dot_product_attention),
    *(torch.matmul, torch.mm, torch.mv, torch.bmm, torch.addmm, torch.addbmm, torch.baddbmm, torch.einsum),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.mv, Tensor.bmm, Tensor.addmm),
    *(Tensor.baddbmm, torch.conv2d, torch.conv_transpose2d),
}
IN_FLOAT32 = {
    *(F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.normalize),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.kl_div, F.cosine_similarity, F.softplus),
    *(F.binary_cross_entropy_with_logits, torch.layer_norm, torch.softmax, torch.log_softmax, torch.exp),
    *(torch.log, torch.pow, torch.rsqrt, torch.reciprocal, torch.sum, torch.prod, torch.cumsum, torch.norm),
    *(torch.cdist, torch.linalg.vector_norm, Tensor.softmax, Tensor.log_softmax, Tensor.exp, Tensor.log),
    *(Tensor.pow, Tensor.__pow__, Tensor.__rpow__, Tensor.__rtruediv__, Tensor.rsqrt, Tensor.reciprocal),
    *(Tensor.sum, Tensor.prod, Tensor.cumsum, Tensor.norm),
}


class OnGPU(Tensor):
    """A tensor that says it is on the GPU. To PyTorch's own C++ code it is one of the host."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    data = property(
        lambda self: OnGPU(self.held.data), lambda self, values: setattr(self, "held", values.held)
    )

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGPU:
        return Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            requires_grad=held.requires_grad,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"OnGPU({self.held!r})"

    def __format__(self, specification: str) -> str:
        return format(self.held.item(), specification)

    def __reduce_ex__(self, protocol: int) -> tuple:
        return OnGPU, (self.held,)

    def __deepcopy__(self, memo: dict) -> OnGPU:
        return memo.setdefault(id(self), self.detach().clone().requires_grad_(self.requires_grad))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    """Runs every operation, those that make tensors from nothing as well."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Between Python and PyTorch's C++ code: what depends on a tensor's device alone is decided here."""

    on_gpu: bool | None = None  # whether the function that Python has called has a tensor on the GPU

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu):
            return _moved(func, args, kwargs)
        if func is Tensor.backward:
            with self:  # the backward passes of our own functions call others
                gradients = kwargs.pop("gradient", None)
                return torch.autograd.backward(args[0], *(args[1:] or [gradients]), **kwargs)
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return _moved(Tensor.to, (func(*args, **kwargs), device), {})
        if isinstance(first, OnGPU):
            if func in (Tensor.numpy, Tensor.__array__):
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            if func is Tensor.get_device:
                return 0
            if func is Tensor.tolist:
                return first.held.tolist()
            if func is Tensor.new_tensor:
                return _moved(Tensor.cuda, (torch.tensor(*args[1:], **{"dtype": first.dtype, **kwargs}),), {})
        if torch.is_autocast_enabled("cuda") and func in IN_AUTOCAST | IN_FLOAT32:
            precision = torch.get_autocast_dtype("cuda") if func in IN_AUTOCAST else torch.float32
            args, kwargs = tree_map_only(OnGPU, lambda x: _cast(x, precision), (args, kwargs))
        if (asked := kwargs.get("device")) is not None:
            on_gpu = _is_gpu(asked)
        else:
            on_gpu = any(isinstance(x, OnGPU) for x in _tensors(args, kwargs))
        before, _Functions.on_gpu = _Functions.on_gpu, on_gpu
        try:
            return func(*args, **kwargs)
        finally:
            _Functions.on_gpu = before


def _cast(tensor: OnGPU, precision: torch.dtype) -> Tensor:
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return Tensor.to(tensor, precision) if eligible else tensor


def _is_gpu(device: str | torch.device) -> bool:
    return torch.device(device).type == "cuda"


def _tensors(*arguments: Any) -> list[Tensor]:
    return [x for x in tree_flatten(arguments)[0] if isinstance(x, Tensor)]


def _moved(func: Any, args: tuple, kwargs: dict) -> Tensor:
    """`Tensor.to`, `cuda` and `cpu`: a copy where the device changes."""
    tensor, *rest = args
    device = {Tensor.cuda: GPU, Tensor.cpu: HOST}.get(func) or kwargs.get("device")
    dtype = kwargs.get("dtype")
    for value in rest:
        if isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, (str, torch.device)):
            device = value
        elif isinstance(value, torch.dtype):
            dtype = value
    if device is not None and torch.device(device).type == "meta":
        return torch.empty_like(tensor, device="meta", dtype=dtype)
    to_gpu = isinstance(tensor, OnGPU) if device is None else _is_gpu(device)
    if to_gpu != isinstance(tensor, OnGPU):
        tensor = aten._to_copy.default(tensor, device=GPU if to_gpu else HOST)
    return Tensor.to(tensor, dtype or tensor.dtype, copy=kwargs.get("copy", False))


def _run(func: Any, args: tuple, kwargs: dict) -> Any:
    tensors = _tensors(args, kwargs)
    held = [isinstance(x, OnGPU) for x in tensors]
    if any(held) and not all(held) and func not in COPIES:
        _refuse_two_devices(func, args, tensors)
    asked = kwargs.get("device")
    if _recorded_waits is not None and _waits(func, args, held, asked):
        _recorded_waits.append(str(func))
    on_gpu = any(held) if asked is None else _is_gpu(asked)
    if func is aten.copy_.default:
        on_gpu = held[0]
    if not on_gpu and not (tensors and asked is None):
        # C++ code takes the device from a tensor that it has: of the function's arguments, or a gradient.
        on_gpu = torch._C._current_graph_task_id() != -1 if _Functions.on_gpu is None else _Functions.on_gpu
    inner_args, inner_kwargs = tree_map_only(OnGPU, lambda x: x.held, (args, kwargs))
    inner_kwargs.pop("pin_memory", None)
    if asked is not None:
        inner_kwargs["device"] = HOST
    out = func(*inner_args, **inner_kwargs)
    if not on_gpu:
        return out
    out = tree_map_only(Tensor, lambda x: x if isinstance(x, OnGPU) else OnGPU(x), out)
    return return_and_correct_aliasing(func, args, kwargs, out)


def _waits(func: Any, args: tuple, held: list[bool], asked: str | torch.device | None) -> bool:
    if func in COPIES:
        to_gpu = held[0] if func is aten.copy_.default or asked is None else _is_gpu(asked)
        return held[-1] and not to_gpu
    # A mask as index: the number of its places says the result's shape.
    by_mask = func in INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1])
    return any(held) and (func in WAITS or by_mask)


_recorded_waits: list[str] | None = None


@contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """Within it: the operations at which the host waits for the GPU, in order."""
    global _recorded_waits
    before, _recorded_waits = _recorded_waits, []
    try:
        yield _recorded_waits
    finally:
        _recorded_waits = before


def _refuse_two_devices(func: Any, args: tuple, tensors: list[Tensor]) -> None:
    if func in INDEXING:
        tensors = [x for x in (args[0], *args[2:3]) if isinstance(x, Tensor)]
    # A single number of the host may take part everywhere, but a GPU does not write to it.
    written = func._schema.is_mutable and not isinstance(tensors[0], OnGPU)
    if written or any(not isinstance(x, OnGPU) and x.ndim for x in tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found cuda:0 and cpu")


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Within it PyTorch has one GPU, of compute capability 9.0, with bfloat16."""
    properties = SimpleNamespace(name="a pretended GPU", major=9, minor=0, total_memory=80 << 30)
    answers = {
        "_lazy_init": None,
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "is_current_stream_capturing": False,
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 1 << 30,
        "is_bf16_supported": True,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": [torch.zeros(16, dtype=torch.uint8)],
        "set_rng_state": None,
        "set_rng_state_all": None,
        "manual_seed": None,
        "manual_seed_all": None,
    }
    load = torch.load

    def load_to(file: Any, map_location: Any = None, **kwargs: Any) -> Any:
        if not isinstance(map_location, (str, torch.device)) or not _is_gpu(map_location):
            return load(file, map_location, **kwargs)
        return tree_map_only(Tensor, lambda x: x.to(GPU), load(file, "cpu", **kwargs))

    with ExitStack() as stack:
        stack.enter_context(patch("torch.load", load_to))
        for name, answer in answers.items():
            stack.enter_context(patch(f"torch.cuda.{name}", lambda *_, answer=answer, **__: answer))
        stack.enter_context(patch("torch.Tensor.pin_memory", lambda tensor, *_: tensor))
        stack.enter_context(patch("mmengine.device.utils.DEVICE", "cuda"))
        stack.enter_context(patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
        # `Module.to` gives new parameters; values set into the old ones would lose their class.
        stack.callback(future.set_overwrite_module_params_on_conversion, False)
        future.set_overwrite_module_params_on_conversion(True)
        stack.enter_context(_Functions())
        stack.enter_context(_Operations())
        yield
