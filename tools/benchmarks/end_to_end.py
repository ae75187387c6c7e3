"""Speed of the real Runner, with loading, hooks, logging and schedules, relative to the bare training step.

It runs the ImageNet recipe with its pipeline, hooks and optimizer wrapper, on JPEG files of scikit-image's
photographs with random tokens. The bare step is `train_step` of the same model and wrapper on a batch that is
already loaded, timed before and after the run.
"""

import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from data_path import write_photographs
from harness import ON_GPU, ROOT, machine, parse_options, report
from mmengine.logging import MMLogger
from mmengine.runner import Runner

from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import configure_training, load_config

SIZES = ("tiny", "small", "base")
WARM_UP = 3


def make_runner(args: Namespace, folder: Path) -> Runner:
    """Build the recipe's runner for training on the photographs."""
    (recipe,) = (ROOT / "configs/mapet").glob(f"mapet_vit-{args.size}-p16_kclip_*_in1k.py")
    cfg = load_config(str(recipe), work_dir=str(folder / "work"))
    loader = cfg.train_dataloader
    loader.batch_size, loader.num_workers = args.batch, args.workers
    loader.persistent_workers = args.workers > 0
    loader.dataset = dict(
        type="CustomDataset",
        data_root=str(folder),
        data_prefix="train",
        with_label=False,
        pipeline=loader.dataset.pipeline,
    )
    next(step for step in loader.dataset.pipeline if "store" in step)["store"] = str(folder / "tokens")
    loader.sampler = dict(type="InfiniteSampler", shuffle=True)
    cfg.train_cfg = dict(by_epoch=False, max_iters=WARM_UP + args.iterations)
    cfg.param_scheduler = None
    cfg.default_hooks.checkpoint = None
    cfg.log_level = "ERROR"
    configure_training(cfg, no_validate=True)
    return build_runner(cfg, "none")


def bare_steps(runner: Runner, batch: dict, count: int) -> float:
    """Median seconds of the model's train step."""
    taken = []
    for _ in range(WARM_UP + count):
        start = time.perf_counter()
        runner.model.train_step(batch, runner.optim_wrapper)
        if ON_GPU:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[WARM_UP:])


def recipe_options(doc: str, arguments: Sequence[str] | None, **more: int) -> Namespace:
    """Options of a benchmark that runs the recipe with `make_runner`, whose log is kept quiet."""
    MMLogger.get_instance("benchmark", log_level="ERROR")
    size = ("small" if ON_GPU else "tiny", SIZES)
    batch, workers = (64, 12) if ON_GPU else (8, 1)
    return parse_options(doc, arguments, size=size, batch=batch, workers=workers, **more)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and print the relative speed."""
    args = recipe_options(__doc__, arguments, iterations=100 if ON_GPU else 20)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_photographs(folder)
        runner = make_runner(args, folder)
        batch = next(iter(runner.build_dataloader(runner.cfg.train_dataloader)))
        runner.train_loop  # noqa: B018 (builds the loop, which initialising the optimizer needs)
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        runner.model.train()
        before = bare_steps(runner, batch, args.iterations // 2)
        runner.train()
        after = bare_steps(runner, batch, args.iterations // 2)
        history, _ = runner.message_hub.get_scalar("train/time").data
        waits, _ = runner.message_hub.get_scalar("train/data_time").data
    whole, waited = (statistics.median(of[WARM_UP:]) for of in (history, waits))
    bare = (before + after) / 2
    both = f"{1000 * before:.0f}, {1000 * after:.0f}"
    rows = [
        ["bare step, before and after", both, f"{args.batch / bare:.1f}"],
        ["Runner, median iteration", f"{1000 * whole:.0f}", f"{args.batch / whole:.1f}"],
        ["of it waiting for data", f"{1000 * waited:.0f}", ""],
    ]
    what = f"ViT-{args.size}, batch {args.batch}, {args.workers} workers; {machine()}"
    report(what, ["", "ms", "images/s"], rows)
    print(f"\nthe Runner reaches {100 * bare / whole:.1f} % of the bare step")


if __name__ == "__main__":
    main()
