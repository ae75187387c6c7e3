"""The demo: from raw images to a segmentation mIoU on the embedded digits, with and without pre-training.

    python tools/demo.py [--jobs N] [--out work_dirs/demo]

Runs each stage below, prints its exact command line, and ends with a table and a self-contained HTML report.
Killed or failed, the same command resumes: stages that are done are skipped.
"""

import argparse
import sys
import time
from pathlib import Path

from mapet_mm.errors import one_line_errors
from mapet_mm.experiments.demo import (
    Comparison,
    codebook_section,
    curves_section,
    final_checkpoint,
    machine_facts,
    masks_section,
    results_table,
    segmentation_section,
    stage_table,
)
from mapet_mm.experiments.stages import Stage, StageRunner
from mapet_mm.visualization.report import Report, format_table, write_report

CONFIGS = "configs/digits"
KCLIP = f"{CONFIGS}/kclip_digits.py"
PRETRAIN = f"{CONFIGS}/mapet_vit-micro-p4_kclip_1xb32-coslr-16e_digits.py"
UPERNET = f"{CONFIGS}/vit-micro-p4_upernet_1xb8-500i_digits-scenes-50-48x48.py"
DATA, CODEBOOK, TOKENS = "data/digits", "work_dirs/digits/codebook.safetensors", "work_dirs/digits/tokens"
REFERENCE = "docs/reference/mapet_digits.json"

# Name, task with what is measured, the metric as MMEngine logs it, config.
DOWNSTREAM = (
    (
        "probe",
        "linear probe, 100 labels: top-1 (%)",
        "accuracy/top1",
        f"{CONFIGS}/vit-micro-p4_1xb100-linear-mean-coslr-200e_digits-100.py",
    ),
    (
        "finetune-100",
        "fine-tuning, 100 labels: top-1 (%)",
        "accuracy/top1",
        f"{CONFIGS}/vit-micro-p4_1xb50-coslr-120e_digits-100.py",
    ),
    (
        "finetune-all",
        "fine-tuning, all labels: top-1 (%)",
        "accuracy/top1",
        f"{CONFIGS}/vit-micro-p4_1xb64-coslr-20e_digits.py",
    ),
    ("upernet", "UperNet, 50 labelled scenes: mIoU (%)", "mIoU", UPERNET),
)
NOTES = (
    "One run each, seed 0. Validation after the last epoch, no selection.",
    "The same digits come back on the same machine type only; docs/results.md has the spread of three seeds.",
    "k-CLIP's encoder here is a small CLIP ResNet with fixed random weights.",
)
# Imported once; the stages are forked from here.
PRELOAD = ("torch", "open_clip", "mmpretrain.apis", "mmseg.apis", "mapet_mm.models", "mapet_mm.datasets")


def train(name: str, config: str, out: Path, needs: tuple[str, ...], *options: str) -> Stage:
    work_dir = f"{out}/{name}"
    command = ["tools/train.py", config, "--work-dir", work_dir, "--resume"]
    if options:
        command += ["--cfg-options", *options]
    return Stage(name, command, [final_checkpoint(config, work_dir), work_dir], needs)


def list_stages(out: Path) -> list[Stage]:
    """The whole road, each stage after the ones that it needs; pre-training comes first where it can."""
    checkpoint = final_checkpoint(PRETRAIN, out / "pretrain")
    stages = [
        Stage("data", ["tools/dataset_converters/digits.py"], [DATA, f"{DATA}_scenes"], disposable=False),
        Stage("codebook", ["tools/fit_codebook.py", KCLIP, "--overwrite"], [CODEBOOK], ["data"]),
        Stage("tokens", ["tools/extract_tokens.py", KCLIP], [TOKENS], ["codebook"]),
        train("pretrain", PRETRAIN, out, ("tokens",)),
    ]
    for name, _, _, config in DOWNSTREAM:
        stages += [
            train(
                f"{name}_pretrained",
                config,
                out,
                ("pretrain",),
                f"model.backbone.init_cfg.checkpoint={checkpoint}",
            ),
            train(f"{name}_scratch", config, out, ("data",), "model.backbone.init_cfg=None"),
        ]
    return stages


def make_report(runner: StageRunner, out: Path, set_up: float | None, started: float) -> Report:
    comparisons = [
        Comparison(task, metric, f"{out}/{name}_scratch", f"{out}/{name}_pretrained")
        for name, task, metric, _ in DOWNSTREAM
    ]
    upernet = final_checkpoint(UPERNET, out / "upernet_pretrained")
    reference = REFERENCE if Path(REFERENCE).is_file() else None
    sections = [
        curves_section(out / "pretrain", reference),
        codebook_section(TOKENS, DATA),
        masks_section(),
        segmentation_section(UPERNET, upernet),
    ]
    return Report(
        title="MaPeT on handwritten digits",
        summary="From raw images to a segmentation mIoU: digits, codebook, tokens, MaPeT pre-training, "
        "then the same small ViT with and without it. "
        f"This run took {time.monotonic() - started:.0f} s with {runner.jobs} stages side by side.",
        results=results_table(comparisons, NOTES),
        sections=sections,
        stages=stage_table(runner, [] if set_up is None else [("set-up", set_up)]),
        facts=machine_facts(runner.jobs),
        commands=["export OMP_NUM_THREADS=1", *(stage.line for stage in runner.stages)],
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("work_dirs/demo"), help="folder for all it writes")
    parser.add_argument("--jobs", type=int, default=2, help="stages side by side, one thread each")
    parser.add_argument("--setup-seconds", type=float, help="time of the set-up, for the report")
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args, started = parse_args(), time.monotonic()
    try:
        runner = StageRunner(list_stages(args.out), args.out, args.jobs)
        runner.run(PRELOAD)
        print("drawing the report")
        report = make_report(runner, args.out, args.setup_seconds, started)
        path = write_report(args.out / "report.html", report)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command resumes")
    print(f"\n{format_table(report.results)}\n\nreport: {path} (open it in a browser)")
    print("next: put your own images in a folder and follow README.md, `Your own images`")


if __name__ == "__main__":
    main()
