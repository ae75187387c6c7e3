"""Tell whether a pre-training helped: its weights beside those it started from, and beside random ones.

    mapet-mm verdict RUN
    mapet-mm verdict MODEL CHECKPOINT --start OTHER_MODEL --data FOLDER

RUN is the folder of a mapet-mm pretrain, which ends with this. MODEL is named as in mapet-mm evaluate. With
labels, k-NN and ten labels a class say by how many points it gained, with 95 % intervals; without labels
there are weaker measures. Features are kept in --cache, so that the same command resumes after a kill.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import add_cache_option, described_parser

from mapet_mm.cli.data_options import add_class_options, add_workers_option
from mapet_mm.utils.errors import one_line_errors

if TYPE_CHECKING:
    from mapet_mm.utils.run_folder import Run


def parse_args() -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument("model", help="RUN, or a config or name of a model")
    parser.add_argument("checkpoint", nargs="?", help="its weights")
    parser.add_argument(
        "--start",
        nargs="+",
        metavar=("MODEL", "CHECKPOINT"),
        help="what the pre-training started from (default: the weights that its config names, if any)",
    )
    parser.add_argument("--data", help="images, as for mapet-mm evaluate (default: those that MODEL names)")
    add_workers_option(parser)
    add_class_options(parser, "in place of those of the pre-training, or of the folders of --data")
    add_cache_option(parser)
    parser.add_argument("--out", type=Path, help="folder for verdict.json and, of a RUN, report.html")
    return parser.parse_args()


def enter_run(args: argparse.Namespace) -> Run | None:
    """Go into a RUN, to which its paths are relative, and make those of the arguments absolute.

    Returns:
        RUN as it is seen from there; None if MODEL is none.
    """
    from mapet_mm.utils.run_folder import TESTED, Run

    args.cache = args.cache.absolute()
    args.out = args.out and args.out.absolute()
    args.labels = args.labels and args.labels.absolute()
    if args.groups and not args.groups.isdecimal():  # no level of folders
        args.groups = os.path.abspath(args.groups)
    if not Path(args.model, TESTED).is_file():
        return None
    args.data = absolute(args.data)
    args.checkpoint = absolute(args.checkpoint)
    args.start = args.start and [absolute(word) for word in args.start]
    os.chdir(args.model)
    args.model = "."
    return Run(Path())


def absolute(word: str | None) -> str | None:
    """The absolute path of a file or folder that is there; another word, such as a model's name, as it is."""
    return os.path.abspath(word) if word and os.path.exists(word) else word


@one_line_errors
def main() -> None:
    args = parse_args()
    from mmengine.logging import MMLogger

    from mapet_mm.cli.held_out import choice_words, drop_skipped
    from mapet_mm.cli.other_classes import with_other_classes
    from mapet_mm.cli.run_report import method_words, report_of_run
    from mapet_mm.evaluation.image_sets import DeclaredSets
    from mapet_mm.evaluation.images import Data
    from mapet_mm.evaluation.models import RANDOM, load_model
    from mapet_mm.evaluation.run import say_seen
    from mapet_mm.evaluation.verdict import RESULT, START, judge
    from mapet_mm.interop.model_card import add_verdict
    from mapet_mm.utils.atomic_files import replace_json
    from mapet_mm.utils.dist import choose_device, run_alone
    from mapet_mm.utils.run_folder import PRETRAINING, REPORT, VERDICT, Run
    from mapet_mm.utils.tables import format_table
    from mapet_mm.visualization.report import write_report
    from mapet_mm.visualization.training_log import last_values

    run_alone()
    choose_device()
    MMLogger.get_instance("verdict", log_level="WARNING")  # MMEngine logs initialisations
    run = enter_run(args)
    accuracy = None
    if run:
        drop_skipped(run)
        if not args.checkpoint and run.result == run.checkpoint:
            accuracy = last_values(run.work_dir).get("token/accuracy")  # of the last weights

    result = load_model(args.model, args.checkpoint)
    asked = Data(args.data, args.labels, args.class_level, args.groups, args.workers)
    declared, asked = with_other_classes(result.config, args.model, asked, args.cache)
    loaded = {RESULT: result}
    start = load_model(*args.start) if args.start else load_model(PRETRAINING if run else args.model)
    # A RUN that kept nothing of the change of its start is judged as well.
    if not start.is_random and (run or start.digest != result.digest):
        loaded[START] = start
    loaded[RANDOM] = load_model(args.model, args.checkpoint, random=True)
    sets = DeclaredSets(declared, asked)
    models = {}
    for name, model in loaded.items():
        own = args.start and name == START and args.data
        models[name] = (model, sets.of_model(model.config if own else declared))
    if args.data:  # a RUN's own images for tests are held out
        say_seen(declared, models[RESULT][1])
    if args.out:  # before hours of work, if nothing can be written there
        args.out.mkdir(parents=True, exist_ok=True)
    verdict = judge(models, args.cache, accuracy)
    if run:
        about_choice = choice_words(args.model, args.checkpoint, args.data)
        sentences = [verdict.sentence, about_choice, method_words(run)]
        verdict = replace(verdict, sentence=" ".join(filter(None, sentences)))
    print(f"\n{format_table(verdict.table)}\n\n{verdict.sentence}")
    if args.out:
        replace_json(args.out / VERDICT, verdict.as_json())
        print(f"wrote {args.out / VERDICT}")
    if args.out and run:
        report = report_of_run(run, verdict, loaded, models[RESULT][1], args.cache)
        print(f"wrote {write_report(args.out / REPORT, report)} (open it in a browser)")
        if args.out == Path().absolute() and not args.checkpoint:  # the cards of RUN's exports
            add_verdict(Run(args.out))


if __name__ == "__main__":
    main()
