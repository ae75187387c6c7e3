"""Classify by nearest neighbours in a checkpoint's feature space: a look at a pre-training, nothing trained.

    python tools/knn_probe.py configs/micro/mapet_vit-micro_kclip_1xb32-coslr.py CHECKPOINT

The config has a section `knn_probe` with the options of KNNProbeHook: the labelled images and k. Several
processes share the work: `torchrun --nproc_per_node=8 tools/knn_probe.py ... --launcher pytorch`.
"""

import argparse
import os

from mmengine.config import Config, DictAction
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, init_default_scope
from mmengine.runner import Runner

import mapet_mm.quiet  # noqa: F401
from mapet_mm.engine.checkpoints import LaunchError, require_checkpoint
from mapet_mm.engine.launch import build_runner, load_config
from mapet_mm.engine.processes import stop_processes
from mapet_mm.errors import one_line_errors


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="config of the pre-training")
    parser.add_argument("checkpoint", help="what it wrote")
    parser.add_argument("--k", type=int, help="neighbours that vote; the config's by default")
    parser.add_argument(
        "--work-dir", help="folder for the log; default: <config> in its work_root or work_dirs"
    )
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="load a checkpoint that holds Python objects, which can run code: only a file you trust",
    )
    parser.add_argument("--cfg-options", nargs="+", action=DictAction, metavar="KEY=VALUE")
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"], default="none")
    args = parser.parse_args()
    os.environ.setdefault("LOCAL_RANK", "0")
    return args


def build(
    cfg: Config, checkpoint: str, launcher: str = "none", trust_checkpoint: bool = False
) -> tuple[Runner, Hook]:
    """A runner with the model and the checkpoint, and the hook."""
    if "knn_probe" not in cfg:
        raise LaunchError(f"config {cfg.filename} has no `knn_probe`: see configs/_base_/datasets")
    require_checkpoint("checkpoint", checkpoint, trust_checkpoint)
    cfg.load_from, cfg.resume = checkpoint, False
    for key in ("train", "val", "test"):
        cfg[f"{key}_dataloader"] = cfg[f"{key}_cfg"] = None
    cfg.optim_wrapper = cfg.val_evaluator = cfg.test_evaluator = None
    cfg.param_scheduler = None
    for key in ("runner_type", "strategy"):  # a model trained in shares fits whole without its optimizer
        cfg.pop(key, None)
    init_default_scope(cfg.default_scope)
    runner = build_runner(cfg, launcher)
    runner.load_or_resume()
    return runner, HOOKS.build(cfg.knn_probe)


@one_line_errors
def main() -> None:
    args = parse_args()
    cfg = load_config(args.config, args.cfg_options, args.work_dir)
    if args.k is not None:
        cfg.merge_from_dict({"knn_probe.k": args.k})
    runner, hook = build(cfg, args.checkpoint, args.launcher, args.trust_checkpoint)
    top1 = hook.probe(runner)
    if is_main_process():
        print(f"top-1 of {hook.k} nearest neighbours: {top1:.2f} % ({args.checkpoint})")
    del runner
    stop_processes()


if __name__ == "__main__":
    main()
