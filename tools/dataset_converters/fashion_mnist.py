"""Write Fashion-MNIST, 70,000 photographs of ten kinds of garment (MIT licence), and scenes made of them.

    apt-get install dataset-fashion-mnist && python tools/dataset_converters/fashion_mnist.py
    python tools/dataset_converters/fashion_mnist.py --source FOLDER      # with the four IDX files
    python tools/dataset_converters/fashion_mnist.py --download           # by torchvision, into <out>

makes in `<out>`:

    fashion_mnist                     ImageNet-style folder: train 60,000, val 10,000, shorter lists of train
    fashion_mnist_scenes              ADE20K-style folder: images and pixel labels (0 is background)
    fashion_mnist_scenes_unlabelled   other scenes, without labels, for pre-training

The same options give the same files, and a second run changes nothing.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import mapet_mm.utils.logging  # noqa: F401
from mapet_mm.datasets.fashion_mnist import (
    GarmentsOptions,
    download_source,
    find_source,
    read_garments,
    write_garments,
)
from mapet_mm.datasets.fashion_mnist_scenes import (
    GarmentScenesOptions,
    write_garment_scenes,
    write_unlabelled_scenes,
)
from mapet_mm.utils.errors import one_line_errors


def parse_args() -> argparse.Namespace:
    garments, scenes = GarmentsOptions(), GarmentScenesOptions()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder for all datasets")
    parser.add_argument("--source", type=Path, help="folder with the IDX files, compressed or not")
    parser.add_argument("--download", action="store_true", help="have torchvision fetch the IDX files")
    parser.add_argument(
        "--lists",
        type=int,
        nargs="*",
        default=garments.lists,
        help="lengths of the balanced short lists of train",
    )
    parser.add_argument("--seed", type=int, default=garments.seed, help="seed of the lists and the scenes")
    parser.add_argument("--scene-size", type=int, default=scenes.image_size, help="side of a scene, pixels")
    parser.add_argument("--train-scenes", type=int, default=scenes.training)
    parser.add_argument("--val-scenes", type=int, default=scenes.validation)
    parser.add_argument("--unlabelled-scenes", type=int, default=20_000, help="for pre-training")
    parser.add_argument("--overwrite", action="store_true", help="replace data written with other options")
    return parser.parse_args()


@one_line_errors
def main() -> None:
    args = parse_args()
    if args.download:
        download_source(args.out)
    source = read_garments(find_source(args.source, args.out))
    scenes = GarmentScenesOptions(args.scene_size, args.train_scenes, args.val_scenes, seed=args.seed)
    unlabelled = replace(scenes, training=args.unlabelled_scenes, seed=args.seed + 1)
    for name, write, options in (
        ("fashion_mnist", write_garments, GarmentsOptions(tuple(args.lists), args.seed)),
        ("fashion_mnist_scenes", write_garment_scenes, scenes),
        ("fashion_mnist_scenes_unlabelled", write_unlabelled_scenes, unlabelled),
    ):
        written = write(args.out / name, source, options, args.overwrite)
        print(f"{args.out / name}: {'written' if written else 'already there, left as it is'}")


if __name__ == "__main__":
    main()
