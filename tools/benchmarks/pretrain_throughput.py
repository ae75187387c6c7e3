"""Throughput and memory of a pre-training step: the naive reference, ours, ours compiled, BEiT, MIM.

A step is forward, backward and AdamW on random images and tokens, without stochastic depth. The reference is
tests/naive_two_stream.py: float masks for each image and head, made before the time starts, and the streams
apart; it steps PyTorch's default AdamW, the others the fused one. Each variant has processes of its own, as a
training has, in turns with the others'; times are medians over all their rounds. On CPU they keep the memory
they free, as tools/train.py does; the reference is measured without that as well. Peak memory is what a step
adds to what stays between steps: inputs, masks, activations and gradients.
"""

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from mmpretrain.structures import DataSample
from torch import Tensor, nn

from mapet_mm.arithmetic import plain_step_flops, step_flops
from mapet_mm.benchmark import machine, table, time_in_turns
from mapet_mm.datasets.masking import BlockwiseMask
from mapet_mm.engine.compilation import CompileHook
from mapet_mm.engine.freed_memory import keep_freed_memory
from mapet_mm.registry import MODELS

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))
from naive_two_stream import build_masks, two_stream_forward  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DIMS = {"tiny": 192, "small": 384, "base": 768, "large": 1024}
VARIANTS = {
    "reference": "naive reference",
    "reference_kept": "naive reference, freed memory kept",
    "eager": "MaPeT",
    "compiled": "MaPeT, compiled",
    "checkpointed": "MaPeT, checkpointed",
    "kept": "MaPeT, nothing computed again",
    "half": "MaPeT, half the predictions",
    "beit": "BEiT (MMPretrain)",
    "mim": "MIM",
}
WARM_UP = 2


def parse_args() -> argparse.Namespace:
    """Command line."""
    on_gpu = torch.cuda.is_available()
    cases = ["small:bfloat16", "base:bfloat16"]
    variants = [variant for variant in VARIANTS if variant not in ("reference_kept", "kept")]
    if not on_gpu:
        cases, variants = ["tiny:float32", "tiny:bfloat16", *cases], ["reference_kept", *variants]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=cases, help="ViT size:precision ...")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=variants)
    parser.add_argument("--batch", type=int, default=64 if on_gpu else 8, help="images of a step")
    parser.add_argument("--rounds", type=int, default=10 if on_gpu else 4, help="steps timed in each process")
    parser.add_argument(
        "--repeats", type=int, default=1 if on_gpu else 3, help="processes of each variant, in turns"
    )
    parser.add_argument("--only", nargs=2, metavar=("TASK", "VARIANT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    for case in args.cases:
        size, _, precision = case.partition(":")
        if size not in DIMS or precision not in DTYPES:
            parser.error(f"--cases {case}: SIZE:PRECISION with {', '.join(DIMS)} and {', '.join(DTYPES)}")
    return args


class Step:
    """One variant's training step, and the products' arithmetic of it."""

    def __init__(self, variant: str, size: str, precision: str, batch: int) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.variant, self.dtype = variant, DTYPES[precision]
        self.is_reference = variant.startswith("reference")
        torch.manual_seed(0)
        self.model = build_model(variant, size).to(self.device).train()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, fused=not self.is_reference or None)
        for parameter in parameters:  # so that the optimizer's state is there
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.batch = batch
        self.flops = batch * self._image_flops()
        if variant == "compiled":
            CompileHook().compile(self.model)
        self.make_inputs()

    def make_inputs(self) -> None:
        """Images, tokens, and what else the variant's loader would hand over."""
        self.images = torch.randn(self.batch, 3, 224, 224, device=self.device)
        self.tokens = torch.randint(8192, (self.batch, 14, 14), device=self.device)
        masks = BlockwiseMask((14, 14), 75)
        self.samples = [DataSample(mask=torch.as_tensor(masks({})["mask"])) for _ in range(self.batch)]
        if self.is_reference:
            backbone = self.model.backbone
            # The masks' content does not change the time: a few images' are enough, and are copied.
            permutation = backbone.sample_permutation(min(4, self.batch), self.device)
            copies = -(-self.batch // len(permutation))
            made = build_masks(permutation, backbone.cutting_point, "mapet", self._num_heads())
            self.permutation = permutation.repeat(copies, 1)[: self.batch]
            self.masks = [mask.repeat(copies, 1, 1, 1)[: self.batch] for mask in made]

    def drop_inputs(self) -> None:
        """Forget what `make_inputs` made."""
        self.images = self.tokens = self.samples = self.permutation = self.masks = None

    def __call__(self) -> None:
        with torch.autocast(self.device, self.dtype, enabled=self.dtype is not torch.float32):
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
            num_heads=self._num_heads(),
            drop_rates=[0.0] * len(backbone.layers),
            masks=self.masks,
        )
        targets = self.tokens.flatten(1)[is_target[:, 1:]]
        return nn.functional.cross_entropy(head(latents).flatten(0, 1), targets)

    def _num_heads(self) -> int:
        return self.model.backbone.layers[0].attn.num_heads

    def _image_flops(self) -> int:
        backbone = self.model.backbone
        settings = backbone.arch_settings
        sizes = dict(
            depth=len(backbone.layers),
            dim=backbone.embed_dims,
            feedforward=settings["feedforward_channels"],
            patch_values=3 * 16 * 16,
            vocab_size=8192,
        )
        if self.variant == "beit":
            return plain_step_flops(num_tokens=197, num_masked=75, **sizes)
        return step_flops(backbone.objective, 197, backbone.cutting_point, **sizes)


def build_model(variant: str, size: str) -> nn.Module:
    """The model of the variant's ImageNet recipe."""
    method = variant if variant in ("beit", "mim") else "mapet"
    named = "base" if size == "large" else size
    (recipe,) = (ROOT / "configs" / method).glob(f"{method}_vit-{named}-p16_kclip_*_in1k.py")
    cfg = Config.fromfile(recipe).model
    cfg.backbone.drop_path_rate = 0.0
    if size == "large":
        cfg.backbone.arch, cfg.head.embed_dims = "large", DIMS[size]
    if variant == "checkpointed":
        cfg.backbone.with_cp = True
    if variant == "kept":
        cfg.backbone.recompute = False
    if variant == "half":
        cfg.prediction_ratio = 0.5
    init_default_scope("mmpretrain")
    model = MODELS.build(cfg)
    model.init_weights()
    return model


def peak_memory(step: Step) -> int:
    """Bytes that two steps add to what stays in memory between steps; on CPU in a fresh process."""
    step()  # compiles, and loads what libraries load when they are first used
    step()
    step.drop_inputs()
    gc.collect()
    if step.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1])
    step.make_inputs()
    step()
    step()
    if step.device == "cuda":
        return torch.cuda.max_memory_allocated() - before
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(peak.split()[1]) * 1024 - before


def apart(task: str, variant: str, case: str, args: argparse.Namespace) -> Any:
    """What a process of its own says of a variant: the `task` is time or memory."""
    command = [sys.executable, "-W", "ignore", __file__, "--cases", case, "--batch", str(args.batch)]
    command += ["--rounds", str(args.rounds), "--only", task, variant]
    # For memory, freed blocks go back to the system at once, so that resident memory is what is in use.
    environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "65536"} if task == "memory" else {})}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def answer(task: str, variant: str, case: str, args: argparse.Namespace) -> Any:
    """The other side of `apart`."""
    size, _, precision = case.partition(":")
    if task == "time" and variant != "reference":
        keep_freed_memory()
    step = Step(variant, size, precision, args.batch)
    if task == "memory":
        return peak_memory(step)
    seconds = time_in_turns({"step": step}, args.rounds, WARM_UP)["step"]
    memory = peak_memory(step) if step.device == "cuda" else None
    return {"seconds": seconds, "flops": step.flops, "memory": memory}


def product_rate(precision: str) -> float:
    """FLOP/s of one large product."""
    on_gpu = torch.cuda.is_available()
    device, side = ("cuda", 8192) if on_gpu else ("cpu", 2048)
    square = torch.randn(side, side, device=device, dtype=DTYPES[precision])
    taken = time_in_turns({"product": partial(torch.mm, square, square)}, 5, WARM_UP)["product"]
    return 2 * side**3 / statistics.median(taken)


def measure(case: str, args: argparse.Namespace) -> tuple[dict[str, list[float]], float, dict[str, dict]]:
    """Seconds of each variant's steps, the rate of a large product, and what else was answered of each."""
    taken: dict[str, list[float]] = defaultdict(list)
    answers, rates = {}, []
    for _ in range(args.repeats):
        for variant in args.variants:
            rates.append(product_rate(case.partition(":")[2]))
            answers[variant] = apart("time", variant, case, args)
            taken[variant] += answers[variant]["seconds"]
    for variant, answered in answers.items():
        if answered["memory"] is None:
            answered["memory"] = apart("memory", variant, case, args)
    return taken, statistics.median(rates), answers


def report(case: str, args: argparse.Namespace) -> None:
    """Measure one case and print its table."""
    taken, rate, answers = measure(case, args)
    flops, memory = ({variant: told[key] for variant, told in answers.items()} for key in ("flops", "memory"))
    times = {variant: statistics.median(spent) for variant, spent in taken.items()}
    rows = []
    for variant, spent in times.items():
        rows.append(
            [
                VARIANTS[variant],
                f"{1000 * spent:.0f}",
                f"{args.batch / spent:.1f}",
                f"{times['reference'] / spent:.2f}" if "reference" in times else "",
                f"{memory[variant] / 2**20:.0f}",
                f"{memory[variant] / memory['reference']:.2f}" if "reference" in memory else "",
                f"{flops[variant] / spent / 1e12:.2f}",
                f"{100 * flops[variant] / spent / rate:.0f}",
                f"{1000 * flops[variant] / rate:.0f}",
            ]
        )
    size, _, precision = case.partition(":")
    print(f"\nViT-{size}, {precision}, batch {args.batch}; a large product: {rate / 1e12:.2f} TFLOP/s\n")
    headings = ["", "ms a step", "images/s", "x reference", "peak MiB", "x reference", "TFLOP/s"]
    print(table([*headings, "% of a product's", "floor, ms"], rows), flush=True)


def main() -> None:
    """Measure every case."""
    args = parse_args()
    MMLogger.get_instance("benchmark", log_level="ERROR")
    if args.only:
        print(json.dumps(answer(*args.only, args.cases[0], args)))
        return
    print(f"{machine()}; {args.repeats} x {args.rounds} rounds, interleaved by process, medians")
    for case in args.cases:
        report(case, args)


if __name__ == "__main__":
    main()
