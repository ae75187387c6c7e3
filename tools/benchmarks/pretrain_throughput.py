"""Throughput and memory of a pre-training step: the naive reference, ours, ours compiled, BEiT, MIM.

A step is forward, backward and AdamW on random images and tokens, without stochastic depth. The reference is
tests/naive_two_stream.py: float masks for each image and head, made before timing starts, and separate
streams. It uses PyTorch's default AdamW, the others the fused one. Each variant runs in its own processes, as
a training does, in turns with the others; times are medians over all steps. On CPU the processes keep the
memory that they free, as tools/train.py does; the reference is also measured without that. Peak memory is
what a step adds to the memory in use between steps: inputs, masks, activations and gradients.
"""

import argparse
import gc
import statistics
import sys
from argparse import Namespace
from collections import defaultdict
from functools import partial

import torch
from harness import DEVICE, ON_GPU, ROOT, forget_peak, in_fresh_process, machine, peak, table, time_call
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from mmpretrain.structures import DataSample
from torch import Tensor, nn

from mapet_mm.datasets.transforms.masking import BlockwiseMask
from mapet_mm.engine.hooks.compile_hook import CompileHook
from mapet_mm.models.utils.attention import switch_cudnn_attention
from mapet_mm.registry import MODELS

sys.path += [str(ROOT / "tools"), str(ROOT / "tests")]
from flops import model_step_flops
from naive_two_stream import build_masks, two_stream_forward

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = ("tiny", "small", "base")
VARIANTS = {
    "reference": "naive reference",
    "reference_kept": "naive reference, freed memory kept",
    "eager": "MaPeT",
    "compiled": "MaPeT, compiled",
    "checkpointed": "MaPeT, checkpointed",
    "beit": "BEiT (MMPretrain)",
    "mim": "MIM",
}
WARM_UP = 2


def read_arguments() -> Namespace:
    """Command line."""
    cases = ["small:bfloat16", "base:bfloat16"]
    variants = [variant for variant in VARIANTS if variant != "reference_kept"]
    if not ON_GPU:
        cases, variants = ["tiny:float32", "tiny:bfloat16", *cases], list(VARIANTS)
    known = [f"{size}:{precision}" for size in SIZES for precision in DTYPES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=known, default=cases)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=variants)
    parser.add_argument("--batch", type=int, default=64 if ON_GPU else 8)
    parser.add_argument("--steps", type=int, default=10 if ON_GPU else 4, help="steps of a process")
    parser.add_argument("--repeats", type=int, default=1 if ON_GPU else 3, help="processes of a variant")
    return parser.parse_args()


class Step:
    """One variant's training step, and the FLOPs of its matrix products."""

    def __init__(self, variant: str, case: str, batch: int) -> None:
        size, _, precision = case.partition(":")
        self.dtype = DTYPES[precision]
        self.is_reference = variant.startswith("reference")
        switch_cudnn_attention()  # as a training does
        torch.manual_seed(0)
        self.model = build_model(variant, size).to(DEVICE).train()
        self.heads = self.model.backbone.layers[0].attn.num_heads
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, fused=not self.is_reference or None)
        self.batch = batch
        self.flops = batch * model_step_flops(self.model)
        if variant == "compiled":
            CompileHook().compile(self.model)
        self.make_inputs()

    def make_inputs(self) -> None:
        """Make images, tokens, and everything else that the variant's loader gives."""
        self.images = torch.randn(self.batch, 3, 224, 224, device=DEVICE)
        self.tokens = torch.randint(8192, (self.batch, 14, 14), device=DEVICE)
        masks = BlockwiseMask((14, 14), 75)
        self.samples = [DataSample(mask=torch.as_tensor(masks({})["mask"])) for _ in range(self.batch)]
        if self.is_reference:
            backbone = self.model.backbone
            self.permutation = backbone.sample_permutation(self.batch, DEVICE)
            self.masks = build_masks(self.permutation, backbone.cutting_point, "mapet", self.heads)

    def drop_inputs(self) -> None:
        """Delete the inputs."""
        self.images = self.tokens = self.samples = self.permutation = self.masks = None

    def __call__(self) -> None:
        with torch.autocast(DEVICE, self.dtype, enabled=self.dtype is not torch.float32):
            loss = self._reference_loss() if self.is_reference else self._loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self) -> Tensor:
        return self.model.loss([self.images, self.tokens], self.samples)["loss"]

    def _reference_loss(self) -> Tensor:
        backbone, head = self.model.backbone, self.model.head
        latents, is_target = two_stream_forward(
            dict(backbone.named_parameters()),
            self.images,
            self.permutation,
            cutting_point=backbone.cutting_point,
            objective="mapet",
            patch_size=16,
            num_heads=self.heads,
            drop_rates=[0.0] * len(backbone.layers),
            masks=self.masks,
        )
        targets = self.tokens.flatten(1)[is_target[:, 1:]]
        return nn.functional.cross_entropy(head(latents).flatten(0, 1), targets)


def build_model(variant: str, size: str) -> nn.Module:
    """The model of the variant's ImageNet recipe."""
    method = variant if variant in ("beit", "mim") else "mapet"
    (recipe,) = (ROOT / "configs" / method).glob(f"{method}_vit-{size}-p16_kclip_*_in1k.py")
    cfg = Config.fromfile(recipe).model
    cfg.backbone.drop_path_rate = 0.0
    if variant == "checkpointed":
        cfg.backbone.with_cp = True
    init_default_scope("mmpretrain")
    MMLogger.get_instance("benchmark", log_level="ERROR")
    model = MODELS.build(cfg)
    model.init_weights()
    return model


def peak_memory(step: Step) -> int:
    """Bytes that two steps add to the memory in use between steps; on CPU in a fresh process."""
    step()  # compiles, and loads what libraries load on first use
    step()
    step.drop_inputs()
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if ON_GPU else forget_peak()
    step.make_inputs()
    step()
    step()
    return (torch.cuda.max_memory_allocated() if ON_GPU else peak()) - before


def measure_memory(variant: str, case: str, batch: int) -> int:
    """Peak memory of a variant's step on CPU, in a process that returns freed blocks to the system."""
    return peak_memory(Step(variant, case, batch))


def measure_time(variant: str, case: str, batch: int, steps: int) -> tuple[list[float], int, int | None]:
    """Seconds of each of a variant's steps, its FLOPs, and on a GPU its peak memory."""
    step = Step(variant, case, batch)
    seconds = time_call(step, steps, WARM_UP)
    return seconds, step.flops, peak_memory(step) if ON_GPU else None


def product_rate(precision: str) -> float:
    """FLOP/s of one large matrix product."""
    side = 8192 if ON_GPU else 2048
    square = torch.randn(side, side, device=DEVICE, dtype=DTYPES[precision])
    taken = time_call(partial(torch.mm, square, square), 5, WARM_UP)
    return 2 * side**3 / statistics.median(taken)


def report_case(case: str, args: Namespace) -> None:
    """Measure one case and print its table."""
    size, _, precision = case.partition(":")
    taken: dict[str, list[float]] = defaultdict(list)
    memory, flops, rates = {}, {}, []
    for _ in range(args.repeats):
        for variant in args.variants:
            rates.append(product_rate(precision))
            seconds, flops[variant], memory[variant] = in_fresh_process(
                measure_time, variant, case, args.batch, args.steps
            )
            taken[variant] += seconds
    rate, rows = statistics.median(rates), []
    times = {variant: statistics.median(spent) for variant, spent in taken.items()}
    for variant, spent in times.items():
        if not ON_GPU:  # freed blocks return to the system at once, so resident memory is the memory in use
            memory[variant] = in_fresh_process(
                measure_memory, variant, case, args.batch, MALLOC_MMAP_THRESHOLD_="65536"
            )
        figures = [
            f"{1000 * spent:.0f}",
            f"{args.batch / spent:.1f}",
            f"{times['reference'] / spent:.2f}" if "reference" in times else "",
            f"{memory[variant] / 2**20:.0f}",
            f"{memory[variant] / memory['reference']:.2f}" if "reference" in memory else "",
            f"{flops[variant] / spent / 1e12:.2f}",
            f"{100 * flops[variant] / spent / rate:.0f}",
            f"{1000 * flops[variant] / rate:.0f}",
        ]
        rows.append([VARIANTS[variant], *figures])
    costs = table(
        ["", "ms a step", "images/s", "x reference", "peak MiB", "x reference"], [row[:6] for row in rows]
    )
    arithmetic = table(["", "TFLOP/s", "% of a product's", "floor, ms"], [[row[0], *row[6:]] for row in rows])
    what = f"ViT-{size}, {precision}, batch {args.batch}; a large product: {rate / 1e12:.2f} TFLOP/s"
    print(f"\n{what}\n\n{costs}\n\n{arithmetic}", flush=True)


def main() -> None:
    """Measure every case."""
    args = read_arguments()
    print(f"{machine()}; {args.repeats} x {args.steps} steps, interleaved by process, medians")
    for case in args.cases:
        report_case(case, args)


if __name__ == "__main__":
    main()
