"""Train the model of a config: pre-training, classification or segmentation.

    mapet-mm train configs/micro/vit-micro_1xb64-coslr.py --amp

Several processes: tools/dist_train.sh, or tools/slurm_train.sh on a cluster.
"""

import argparse

from command_line import add_runner_options, described_parser, given_options

from mapet_mm.utils.errors import one_line_errors


def parse_args() -> argparse.Namespace:
    parser = described_parser(__doc__)
    add_runner_options(parser)
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="CHECKPOINT",
        help="resume from this checkpoint, or from the work dir's last one even if the config has changed; "
        "without this option, a run resumes only if its config is the same",
    )
    parser.add_argument("--no-validate", action="store_true", help="train without validation")
    parser.add_argument(
        "--auto-scale-lr",
        action="store_true",
        help="scale the learning rate to the batch size; the config names the one that its rate is for",
    )
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args = parse_args()
    from mmengine.dist import is_main_process

    from mapet_mm.engine.runners.build_runner import build_runner
    from mapet_mm.engine.runners.launch import (
        claimed_work_dir,
        configure_training,
        load_config,
        training_report,
    )
    from mapet_mm.engine.runners.resume import check_start_names
    from mapet_mm.utils.atomic_files import full_disk_named
    from mapet_mm.utils.dist import run_alone, stop_processes

    if args.launcher == "none":
        run_alone()
    cfg = load_config(args.config, args.cfg_options, args.work_dir)
    with claimed_work_dir(cfg.work_dir), full_disk_named(cfg.work_dir):
        configure_training(
            cfg, args.resume, args.amp, args.no_validate, args.auto_scale_lr, args.trust_checkpoint
        )
        runner = build_runner(cfg, args.launcher)
        check_start_names(runner.model, args.trust_checkpoint)
        runner.train()
        if is_main_process():
            print(training_report(cfg, args.config, given_options(args)))
        del runner
        stop_processes()


if __name__ == "__main__":
    main()
