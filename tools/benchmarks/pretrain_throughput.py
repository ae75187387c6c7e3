"""Images a second of pre-training steps: MaPeT, eager and compiled, beside PIM, MIM, VisibleMIM and BEiT.

    python tools/benchmarks/pretrain_throughput.py [--cases tiny:256 base:64] [--variants eager compiled]
    python tools/benchmarks/pretrain_throughput.py --authors FOLDER    # and the authors' code on this machine

A step is that of a recipe's training on ImageNet: forward, backward, clipping, the guard against gradients
that are not finite, and fused AdamW, in the type that the device trains in. Its images and tokens are on the
device already; "as its loop" they are copied, normalised and drawn for in each step, as in a training with a
loader that never waits. The time is between two synchronisations around several steps, and a row has the
median of the repeats. Each case runs in a process of its own, and each row is printed as soon as it is
measured, so that a case which is cut off keeps what it has. With `--profile`, a GPU's kernels go before it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import DEVICE, ON_GPU, ROOT, machine, time_call
from mmengine.config import Config
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import init_default_scope
from mmpretrain.models import VisionTransformer
from mmpretrain.structures import DataSample
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mapet_mm.datasets.transforms.masking import BlockwiseMask
from mapet_mm.engine.hooks.compile_hook import CompileHook
from mapet_mm.engine.hooks.non_finite_hook import NonFiniteHook, Step
from mapet_mm.registry import MODELS
from mapet_mm.utils.splitmix import DRAW_SEED

sys.path.append(str(ROOT / "tools"))
from flops import model_step_flops

VOCABULARY, GRID, SIDE = 8192, 14, 224


@dataclass(frozen=True)
class Variant:
    """A row of the table: a method's recipe, and what is changed in it."""

    label: str
    method: str = "mapet"
    in_loop: bool = False
    with_cp: bool = False
    compile: dict[str, Any] | None = None  # options of CompileHook


VARIANTS = {
    "eager": Variant("MaPeT"),
    "loop": Variant("MaPeT, as its loop", in_loop=True),
    "checkpointed": Variant("MaPeT, checkpointed", with_cp=True),
    "pim": Variant("PIM", method="pim"),
    "mim": Variant("MIM", method="mim"),
    "visible_mim": Variant("VisibleMIM", method="visible_mim"),
    "beit": Variant("BEiT (MMPretrain)", method="beit"),
    "compiled": Variant("MaPeT, compiled", compile={}),
    "compiled_loop": Variant("MaPeT, compiled, as its loop", in_loop=True, compile={}),
    "graphs": Variant("MaPeT, CUDA graphs", compile=dict(mode="reduce-overhead")),
}
# First those without compilation, which takes a minute; CUDA graphs are the ones that may fail.
EAGER = [name for name, variant in VARIANTS.items() if variant.compile is None]
AUTHORS = {"authors": "the authors' code", "authors_loop": "the authors' code, as its loop"}
COLUMNS = ["step", "ms (least to most)", "images/s", "x first such row", "peak GiB"]
COLUMNS += ["% of a product's rate", "warm-up s"]


def read_arguments() -> Namespace:
    """Command line."""
    cases = ["tiny:256", "tiny:128", "small:128", "base:64", "base:128"] if ON_GPU else ["tiny:8"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", default=cases, metavar="SIZE:IMAGES", help="of tiny, small, base"
    )
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS, *AUTHORS], default=EAGER)
    parser.add_argument(
        "--authors", type=Path, help="a clone of the authors' repository: their rows come first"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a repeat, at least")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a case")
    parser.add_argument("--profile", action="store_true", help="count a GPU's kernels after each row")
    parser.add_argument("--dry-run", action="store_true", help="two layers, two images, one step, on the CPU")
    args = parser.parse_args()
    if args.dry_run:
        args.repeats = 1
        args.limit = None  # however slow the machine is
    if args.authors:
        args.variants = [*AUTHORS, *(name for name in args.variants if name not in AUTHORS)]
    elif set(args.variants) & set(AUTHORS):
        parser.error("the authors' rows need --authors FOLDER")
    return args


class PretrainingStep:
    """The training step of a variant's recipe.

    Args:
        variant: what to run.
        size: 'tiny' | 'small' | 'base'.
        num_images: images of a step.
        device: where the model is.
        num_layers: instead of the recipe's 12.
        dtype: of autocast, instead of the device's own.
        backbone: further options of the backbone.
    """

    def __init__(
        self,
        variant: Variant,
        size: str,
        num_images: int,
        device: str = DEVICE,
        num_layers: int | None = None,
        dtype: str | None = None,
        **backbone: Any,
    ) -> None:
        cfg = recipe_of(variant, size, num_layers)
        cfg.model.backbone.update(backbone)
        cfg.optim_wrapper.dtype = dtype
        torch.manual_seed(0)
        self.variant = variant
        with torch.device(device):
            self.model = MODELS.build(cfg.model).train()  # its first weights do not change the time
        self.model.data_preprocessor.to(device)
        if variant.compile is not None:
            CompileHook(**variant.compile).compile(self.model)
        self.wrapper: OptimWrapper = build_optim_wrapper(self.model, cfg.optim_wrapper)
        self.guard = NonFiniteHook()
        self.wrapper.optimizer.register_step_pre_hook(self.guard._check_gradients)
        self.batch = batch_of(num_images, masked=variant.method == "beit", pinned=device == "cuda")
        self.inputs = self.preprocessed()

    def preprocessed(self) -> dict:
        """The batch on the device, as the data preprocessor makes it."""
        return self.model.data_preprocessor(dict(self.batch), training=True)

    def loss(self) -> Tensor:
        """The forward pass."""
        with self.wrapper.optim_context(self.model):
            inputs = self.preprocessed() if self.variant.in_loop else self.inputs
            loss, _ = self.model.parse_losses(self.model(**inputs, mode="loss"))
        return loss

    def __call__(self) -> Tensor:
        self.guard.step = Step(1, [])  # the norms that a training keeps for its log
        loss = self.loss()
        self.wrapper.update_params(loss)
        return loss.detach()


def recipe_of(variant: Variant, size: str, num_layers: int | None = None) -> Config:
    """The recipe of a variant's method for ImageNet."""
    name = variant.method.replace("_", "-")
    (path,) = (ROOT / "configs" / variant.method).glob(f"{name}_vit-{size}-p16_kclip_*_in1k.py")
    cfg = Config.fromfile(path)
    init_default_scope(cfg.default_scope)
    cfg.model.setdefault("data_preprocessor", cfg.data_preprocessor)
    if variant.with_cp:
        cfg.model.backbone.with_cp = True
    if num_layers is not None:
        arch = VisionTransformer.arch_zoo[cfg.model.backbone.arch]
        cfg.model.backbone.arch = dict(arch, num_layers=num_layers)
    return cfg


def batch_of(num_images: int, masked: bool = False, pinned: bool = False, seed: int = 0) -> dict:
    """What a loader gives: bytes of images, with token grids, each image's seed and, for BEiT, a mask."""
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.integers(256, size=(num_images, 3, SIDE, SIDE), dtype=np.uint8))
    masks = BlockwiseMask((GRID, GRID), 75)
    samples = []
    for index in range(num_images):
        sample = DataSample(metainfo=dict(img_path=str(index)))
        sample.set_field(rng.integers(VOCABULARY, size=(GRID, GRID)), "token_grid")
        sample.set_field(int(rng.integers(2**62)), DRAW_SEED)
        if masked:
            sample.set_field(torch.as_tensor(masks({})["mask"]), "mask")
        samples.append(sample)
    return dict(inputs=images.pin_memory() if pinned else images, data_samples=samples)


def build_step(name: str, size: str, num_images: int, args: Namespace) -> Callable[[], Tensor]:
    """The step of a row."""
    num_layers = 2 if args.dry_run else None
    if name in AUTHORS:
        from authors_step import AuthorsStep  # needs their code

        return AuthorsStep(args.authors, size, num_images, DEVICE, name == "authors_loop", num_layers)
    variant = VARIANTS[name]
    if args.dry_run and variant.compile is not None:
        variant = Variant(variant.label, in_loop=variant.in_loop, compile=dict(backend="aot_eager"))
    return PretrainingStep(variant, size, num_images, num_layers=num_layers)


def seconds_of(step: Callable[[], Tensor], args: Namespace) -> tuple[list[float], float]:
    """Seconds of a step in each repeat, and those of the warm-up."""

    def run(count: int) -> float:
        synchronise()
        start = time.perf_counter()
        for _ in range(count):
            step()
        synchronise()
        return time.perf_counter() - start

    warm_up = run(2)  # compiles
    if args.dry_run:
        return [run(1)], warm_up
    warm_up += run(3)  # clocks rise
    count = max(2, int(args.seconds / (run(3) / 3)) + 1)
    return [run(count) / count for _ in range(args.repeats)], warm_up


def synchronise() -> None:
    """Wait until the device is done."""
    if ON_GPU:
        torch.cuda.synchronize()


def product_rate(side: int) -> float:
    """FLOP/s of one large matrix product in bfloat16."""
    square = torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16)
    return 2 * side**3 / statistics.median(time_call(lambda: torch.mm(square, square), 10, 5))


def measure_case(case: str, args: Namespace) -> None:
    """Print a case's table, row by row."""
    logging.disable(logging.WARNING)
    size, _, images = case.partition(":")
    num_images = int(images)
    side = 8192 if ON_GPU else 2048
    if args.dry_run:
        num_images = 2
        side = 256
    rate = product_rate(side)
    print(f"\n### ViT-{size}, {num_images} images a step; a large product: {rate / 1e12:.2f} TFLOP/s\n")
    print(f"| {' | '.join(COLUMNS)} |\n| --- |{' ---: |' * (len(COLUMNS) - 1)}", flush=True)
    first: dict[bool, float] = {}  # seconds, with and without a loop
    failed = False
    for name in args.variants:
        label = VARIANTS[name].label if name in VARIANTS else AUTHORS[name]
        try:
            figures = measure(name, size, num_images, first, rate, args)
        except Exception as error:  # the other rows are measured all the same
            failed = True
            lines = str(error).splitlines() or [""]
            figures = [f"{type(error).__name__}: {lines[0][:160]}".replace("|", "/")] + [""] * 5
        print(f"| {' | '.join([label, *figures])} |", flush=True)
    sys.exit(failed)


def measure(
    name: str, size: str, num_images: int, first: dict[bool, float], rate: float, args: Namespace
) -> list[str]:
    """The figures of a row."""
    torch._dynamo.reset()
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = build_step(name, size, num_images, args)
    taken, warm_up = seconds_of(step, args)
    seconds = statistics.median(taken)
    flops = 0 if name in AUTHORS else num_images * model_step_flops(step.model)
    if args.profile:
        print(kernels_of(step, f"ViT-{size}, {num_images} images, {name}"), flush=True)
    return [
        f"{1000 * seconds:.1f} ({1000 * min(taken):.1f} to {1000 * max(taken):.1f})",
        f"{num_images / seconds:,.0f}",
        f"{first.setdefault(name.endswith('loop'), seconds) / seconds:.2f}",
        f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if ON_GPU else "",
        f"{100 * flops / seconds / rate:.0f}" if flops else "",
        f"{warm_up:.0f}",
    ]


# What a kernel's name has, by kind; the first that fits.
KINDS = {
    "attention": ("fmha", "attention", "flash"),
    "products": ("gemm", "cutlass", "nvjet", "xmma", "splitk"),
    "copies": ("memcpy", "copy", "catarray"),
    "optimizer, clipping": ("multi_tensor", "adam"),
    "compiled": ("triton",),
    "norms": ("layer_norm", "layernorm"),
    "loss": ("softmax", "nll"),
    "reductions": ("reduce",),
    "elementwise": ("elementwise",),
}


def kernels_of(step: Callable[[], Tensor], label: str, steps: int = 3) -> str:
    """Launches of a step, milliseconds of host and device, and the kernels by kind and one by one."""
    synchronise()
    start = time.perf_counter()
    for _ in range(10):
        step()
    host = (time.perf_counter() - start) / 10
    synchronise()
    both = (time.perf_counter() - start) / 10
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            step()
        synchronise()
    averages = profiled.key_averages()
    launches = sum(one.count for one in averages if "Launch" in one.key) / steps
    kernels = [one for one in averages if one.device_type == torch.autograd.DeviceType.CUDA]
    busy: dict[str, float] = defaultdict(float)
    for one in kernels:
        busy[kind_of(one.key)] += one.self_device_time_total / 1000 / steps
    lines = [
        f"\n{label}: {launches:.0f} launches, host {1000 * host:.1f} ms, step {1000 * both:.1f} ms, "
        f"kernels {sum(busy.values()):.1f} ms",
        "; ".join(f"{kind} {busy[kind]:.1f}" for kind in sorted(busy, key=busy.get, reverse=True)),
    ]
    for one in sorted(kernels, key=lambda one: -one.self_device_time_total)[:12]:
        milliseconds = one.self_device_time_total / 1000 / steps
        lines.append(f"  {milliseconds:.2f} ms, {one.count / steps:.0f} x {one.key[:100]}")
    return "\n".join(lines)


def kind_of(kernel: str) -> str:
    """The kind of work that a kernel's name tells."""
    name = kernel.lower()
    for kind, words in KINDS.items():
        if any(word in name for word in words):
            return kind
    return "other"


def main() -> None:
    """Measure each case in a process of its own, for so many seconds at most."""
    args = read_arguments()
    print(f"{machine()}; medians of {args.repeats} repeats", flush=True)
    failed = False
    for case in args.cases:
        process = get_context("spawn").Process(target=measure_case, args=(case, args))
        process.start()
        process.join(args.limit)
        if process.exitcode is None:
            process.kill()
            process.join()
            print(f"\n{case}: cut off after {args.limit:.0f} s", flush=True)
        elif process.exitcode:
            failed = True
            print(f"\n{case}: ended with {process.exitcode}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
