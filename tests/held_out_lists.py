"""What `pretrain` holds out of names, and the names for it: classes by folder, and slices of patients."""

from pathlib import Path

from mapet_mm.cli.held_out import write_lists
from mapet_mm.cli.options import PretrainOptions
from mapet_mm.datasets.labels import labels_of

COUNTS = {"a": 100, "b c": 40, "d": 3}


def names_of(counts: dict[str, int]) -> list[str]:
    return [f"{name}/{index:03d}.jpg" for name, count in counts.items() for index in range(count)]


NAMES = names_of(COUNTS)
SLICES = [f"p{patient:02d}/{number:02d}.png" for patient in range(40) for number in range(25)]


def patients(lines: list[str]) -> set[str]:
    return {line[:3] for line in lines}


def lists(out: Path, names: list[str] = NAMES, **changes: object) -> dict[str, list[str]]:
    options = dict(out=out, images="gone", labels=None, class_level=None, groups=None)
    options.update(no_verdict=False, seed=0, epochs=100)
    args = PretrainOptions(**{**options, **changes})
    print(write_lists(args, labels_of(names, args.labels, args.class_level, args.groups)))
    return {path.name: path.read_text().splitlines() for path in out.iterdir()}
