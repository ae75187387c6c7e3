"""Write the digits, scenes of several digits on textures with pixel labels, and other scenes without labels.

    python research/converters/digits_scenes.py [--out data]

makes in `<out>`, beside the folders of tools/dataset_converters/digits.py:

    digits_scenes               ADE20K-style folder: images and pixel labels (0 background, 1..10 digit 0..9)
    digits_scenes_unlabelled    other scenes, without labels, for pre-training

Nothing is downloaded, the files are always the same, and a second run changes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.extend([str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tools")])
from command_line import described_parser
from converters import scenes
from converters.scenes import Things
from dataset_converters.digits import MARKER, OPTIONS, load_source, render_ink, split_source, write_all

from mapet_mm.utils.errors import one_line_errors

SIDES = (20, 32)  # of digits in scenes, in pixels


def digit_things() -> Things:
    """The digits of the split, drawn in one colour as thick as their ink."""
    split = split_source()

    def draw(row: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        return render_ink(row, side) / 255, np.ones(())

    rows = {"training": split.train, "validation": split.val}
    return Things("digit", load_source().labels, rows, draw, SIDES)


def write_scenes(out: Path, training: int = 400, validation: int = 100, labels: bool = True) -> bool:
    """Write scenes of digits, training ones made of training digits alone; without labels other scenes.

    Arguments and result are `scenes.write_scenes`'s, and the numbers of scenes.
    """
    kept = {key: OPTIONS[key] for key in ("val_per_class", "seed")} | ({} if labels else {"labels": False})
    counts, seed = (training, validation), OPTIONS["seed"] + (not labels)
    return scenes.write_scenes(out, MARKER, digit_things(), counts, kept, seed, labels)


@one_line_errors
def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder for all datasets")
    out = parser.parse_args().out
    write_all(out)
    write_scenes(out / "digits_scenes")
    write_scenes(out / "digits_scenes_unlabelled", training=3000, labels=False)


if __name__ == "__main__":
    main()
