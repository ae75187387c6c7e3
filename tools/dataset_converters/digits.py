"""Write the digits datasets: scikit-learn's handwritten digits, and scenes made of them.

    python tools/dataset_converters/digits.py [--out data]

makes in `<out>`:

    digits                      ImageNet-style folder: train, val and a balanced short list of train
    digits_inverted, _rotated   the same digits and split in other domains
    digits_pixels               ADE20K-style folder: digits and pixel labels (0 background, 1..10 digit 0..9)
    digits_scenes               the same with several digits on textures
    digits_scenes_unlabelled    other scenes, without labels, for pre-training

Nothing is downloaded, the same options give the same files, and a second run changes nothing.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import mapet_mm.utils.logging  # noqa: F401
from mapet_mm.datasets.digits import DOMAINS, DigitsOptions, write_digits
from mapet_mm.datasets.digits_scenes import (
    ScenesOptions,
    write_pixel_labels,
    write_scenes,
    write_unlabelled_scenes,
)
from mapet_mm.utils.errors import one_line_errors


def parse_args() -> argparse.Namespace:
    digits, scenes = DigitsOptions(), ScenesOptions()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder for all datasets")
    parser.add_argument("--seed", type=int, default=digits.seed, help="seed of the split and the scenes")
    parser.add_argument("--image-size", type=int, default=digits.image_size, help="side of a digit, pixels")
    parser.add_argument("--val-per-class", type=int, default=digits.val_per_class)
    parser.add_argument(
        "--few-per-class", type=int, default=digits.few_per_class, help="digits per class in the short list"
    )
    parser.add_argument("--scene-size", type=int, default=scenes.image_size, help="side of a scene, pixels")
    parser.add_argument("--train-scenes", type=int, default=scenes.training)
    parser.add_argument("--val-scenes", type=int, default=scenes.validation)
    parser.add_argument("--unlabelled-scenes", type=int, default=3000, help="for pre-training")
    parser.add_argument("--overwrite", action="store_true", help="replace data written with other options")
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args = parse_args()
    digits = DigitsOptions(args.image_size, args.val_per_class, args.few_per_class, args.seed)
    folders = {domain: args.out / f"digits_{domain}" for domain in DOMAINS}
    folders["plain"] = args.out / "digits"
    scenes = ScenesOptions(
        image_size=args.scene_size,
        training=args.train_scenes,
        validation=args.val_scenes,
        val_per_class=args.val_per_class,
        seed=args.seed,
    )
    for domain, folder in folders.items():
        report(folder, write_digits(folder, replace(digits, domain=domain), args.overwrite))
    unlabelled = replace(scenes, training=args.unlabelled_scenes)
    for name, write, options in (
        ("digits_pixels", write_pixel_labels, digits),
        ("digits_scenes", write_scenes, scenes),
        ("digits_scenes_unlabelled", write_unlabelled_scenes, unlabelled),
    ):
        report(args.out / name, write(args.out / name, options, args.overwrite))
    print("next: python tools/fit_codebook.py configs/micro/kclip.py")


def report(folder: Path, written: bool) -> None:
    images = sum(1 for path in folder.rglob("*.png") if "annotations" not in path.parts)
    print(f"{folder}: {images} images, {'written' if written else 'already there, left as it is'}")


if __name__ == "__main__":
    main()
