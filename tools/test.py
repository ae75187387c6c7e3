"""Test a checkpoint with the config's metrics on its test set; on request, save predictions.

    mapet-mm test CONFIG CHECKPOINT --out predictions.pkl

Several processes: tools/dist_test.sh, or tools/slurm_test.sh on a cluster.
"""

import argparse
from pathlib import Path

from command_line import add_runner_options, described_parser

from mapet_mm.utils.errors import UserError, one_line_errors

PREDICTIONS, METRICS = (".pkl", ".pickle"), (".json", ".yml", ".yaml")


def parse_args() -> argparse.Namespace:
    parser = described_parser(__doc__)
    add_runner_options(parser)
    parser.add_argument("checkpoint", help="checkpoint file")
    parser.add_argument(
        "--out",
        help="where to save results: a .pkl file for predictions, .json or .yml for metrics",
    )
    parser.add_argument("--tta", action="store_true", help="test-time augmentation as in the config")
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args = parse_args()
    kind = Path(args.out).suffix if args.out else ""
    if args.out and kind not in PREDICTIONS + METRICS:
        raise UserError(f"--out {args.out}: a .pkl file for predictions, .json or .yml for metrics")
    from mmengine.dist import is_main_process
    from mmengine.evaluator import DumpResults
    from mmengine.fileio import dump

    from mapet_mm.engine.runners.build_runner import build_runner
    from mapet_mm.engine.runners.launch import configure_test, load_config
    from mapet_mm.utils.atomic_files import full_disk_named
    from mapet_mm.utils.dist import run_alone, stop_processes

    if args.launcher == "none":
        run_alone()
    cfg = load_config(args.config, args.cfg_options, args.work_dir)
    configure_test(cfg, args.checkpoint, args.amp, args.tta, args.trust_checkpoint)
    with full_disk_named(cfg.work_dir):
        runner = build_runner(cfg, args.launcher)
        if kind in PREDICTIONS:
            runner.test_evaluator.metrics.append(DumpResults(args.out))
        metrics = runner.test()
    if is_main_process():
        if kind in METRICS:
            dump(metrics, args.out)
        print(f"wrote {', '.join(filter(None, [runner.log_dir, args.out]))}")
    del runner
    stop_processes()


if __name__ == "__main__":
    main()
