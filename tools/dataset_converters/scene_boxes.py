"""Write boxes, masks, key points and rotated boxes of scenes, for detection and pose recipes.

    python tools/dataset_converters/digits.py
    python tools/dataset_converters/scene_boxes.py [data/digits_scenes]

makes `data/digits_scenes_boxes` from the labels: `{training,validation}.json` in COCO's format, and
`rotated/{training,validation}/*.txt` in DOTA's. The images stay where they are.
"""

import argparse
from pathlib import Path

import mapet_mm.utils.logging  # noqa: F401
from mapet_mm.datasets.scene_boxes import write_scene_boxes
from mapet_mm.utils.errors import one_line_errors


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenes", type=Path, nargs="?", default=Path("data/digits_scenes"))
    parser.add_argument("--out", type=Path, help="folder to make; default: <scenes>_boxes")
    parser.add_argument("--classes", type=int, default=10, help="classes of things")
    parser.add_argument("--overwrite", action="store_true", help="replace files made from other scenes")
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args = parse_args()
    out = args.out or args.scenes.with_name(f"{args.scenes.name}_boxes")
    written = write_scene_boxes(args.scenes, out, args.classes, args.overwrite)
    print(f"{out}: {'written' if written else 'already there, left as it is'}")
    print("next: .venv-detection/bin/python tools/train.py configs/micro/detection/... (docs/mixing.md)")


if __name__ == "__main__":
    main()
