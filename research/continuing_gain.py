"""Continue a small ViT by `mapet-mm pretrain --init`, and compare its verdict with scikit-learn's k-NN.

    apt-get install dataset-fashion-mnist && mapet-mm digits --out data
    python research/continuing_gain.py --data data --out work_dirs/continuing_gain

The ViT is pre-trained on the digits, then continued on photographs of clothes, which it does not know: on
6,000 of them as the command itself would, and on 6,000 others at 1.5 times the rate of its own pre-training,
without layer decay. Each ends with the command's verdict. Beside its figures stand some that share no code
with them: the exported weights in timm, and scikit-learn's k-NN on the images of the verdict. So that a run
takes minutes on one core, there are 512 tokens, of 8 patches an image. The same command resumes after an
interruption.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import timm
import torch
from converters.fashion_mnist import PACKAGE, read_photographs
from mmengine.config import Config
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier
from timm.data import create_transform, resolve_data_config
from torch.nn import functional as F

from mapet_mm.cli.continuing import write_config
from mapet_mm.cli.options import PretrainOptions
from mapet_mm.cli.pretrain import parse_args, prepare, pretrain
from mapet_mm.utils.run_folder import PRETRAINING, TESTED, TOKENIZER, VOTING

SIZES = dict(img_size=28, patch_size=4, embed_dim=96, depth=4, num_heads=3)
PER_CLASS = 600  # photographs of clothes, in each case
CLASSES = 10
START_EPOCHS = 60
OWN_EPOCHS = 6
FAST_EPOCHS = 5
SCRATCH_RATE = 1e-3  # of the start's own pre-training
FAST_RATE = 1.5e-3
VOCABULARY = 512
POSITIONS = 8  # patches of an image, for the codebook
KNN = "k-NN, top-1 (%)"


def write_random_vit(folder: Path) -> None:
    """A ViT of random weights, as a model of timm."""
    if folder.exists():
        return
    torch.manual_seed(0)
    images = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop_pct=1.0, input_size=(3, 28, 28))
    vit = timm.create_model("vit_tiny_patch16_224", pretrained_cfg_overlay=images, num_classes=0, **SIZES)
    timm.models.save_for_hf(vit, str(folder), safe_serialization=True)


def write_clothes(folder: Path, source: Path, part: int) -> None:
    """Some photographs of each class of Fashion-MNIST, in a folder per class; those of two parts differ."""
    if folder.exists():
        return
    photographs = read_photographs(source).train
    random = np.random.default_rng(0)
    for kind in range(CLASSES):
        rows = random.permutation(np.flatnonzero(photographs.labels == kind))
        (folder / str(kind)).mkdir(parents=True)
        for row in rows[part * PER_CLASS : (part + 1) * PER_CLASS]:
            Image.fromarray(photographs.images[row]).save(folder / str(kind) / f"{row:05d}.png")


def configure(args: PretrainOptions, changes: dict[str, object], tokens: dict[str, object]) -> None:
    """Write the command's configs, with changes of both, unless they are there."""
    args.out.mkdir(parents=True, exist_ok=True)
    if (args.out / PRETRAINING).exists():
        return
    prepare(args, args.recorded())
    for name, changed in ((PRETRAINING, changes), (TOKENIZER, tokens)):
        cfg = Config.fromfile(args.out / name)
        cfg.merge_from_dict(changed)
        write_config(args.out / name, cfg)


def at_rate(rate: float) -> list[str]:
    """Options for a highest rate, and no layer decay."""
    return ["--lr", str(rate), "--layer-decay", "1"]


def options(
    images: Path, run: Path, init: Path, tokenizer: str, epochs: int, rates: list[str]
) -> PretrainOptions:
    """The command's options."""
    words = [str(images), "--out", str(run), "--init", str(init), "--tokenizer", tokenizer]
    return parse_args([*words, "--epochs", str(epochs), "--workers", "0", *rates])


def continue_on(images: Path, run: Path, start: Path, epochs: int, rates: list[str]) -> None:
    """Continue the start on images, with a small codebook."""
    args = options(images, run, start, "init", epochs, rates)
    vocabulary = {"model.head.vocab_size": VOCABULARY, "model.target_generator.vocab_size": VOCABULARY}
    tokens = {"codebook.k": VOCABULARY, "codebook.positions_per_image": POSITIONS}
    configure(args, vocabulary, tokens)
    pretrain(args)


@torch.no_grad()
def features_of(exported: Path, images: Path, listed: Path) -> tuple[np.ndarray, np.ndarray]:
    """Class token and patch mean, each normalised, by timm alone; and the labels."""
    vit = timm.create_model(f"local-dir:{exported}", pretrained=True).eval()
    transform = create_transform(**resolve_data_config({}, model=vit), is_training=False)
    names, labels = zip(*(line.rsplit(" ", 1) for line in listed.read_text().splitlines()), strict=True)
    features = []
    for start in range(0, len(names), 256):
        part = [Image.open(images / name).convert("RGB") for name in names[start : start + 256]]
        tokens = vit.forward_features(torch.stack([transform(image) for image in part]))
        halves = torch.stack([tokens[:, 0], tokens[:, 1:].mean(1)], dim=1)
        features.append(F.normalize(halves, dim=2).flatten(1))
    return torch.cat(features).numpy(), np.array(labels)


def knn_of_scikit_learn(exported: Path, images: Path, run: Path) -> float:
    """Percent of the verdict's images whose class the 20 nearest ones find, weighted as the verdict does."""
    known, known_labels = features_of(exported, images, run / VOTING)
    queries, labels = features_of(exported, images, run / TESTED)
    knn = KNeighborsClassifier(
        20, metric="cosine", algorithm="brute", weights=lambda distances: np.exp((1 - distances) / 0.07)
    )
    return 100 * float((knn.fit(known, known_labels).predict(queries) == labels).mean())


def show(title: str, run: Path, start: Path, images: Path) -> None:
    """Print a verdict with scikit-learn's figures beside its own."""
    verdict = json.loads((run / "verdict.json").read_text())
    print(f"\n{title}\n{verdict['sentence']}")
    for measure in verdict["measures"]:
        values = ", ".join(f"{value:.1f} {name}" for name, value in measure["values"].items())
        print(f"  {measure['name']}: {values}")
    (knn,) = (measure for measure in verdict["measures"] if measure["name"] == KNN)
    for name, exported in (("this pre-training", run / "timm"), ("its start", start / "timm")):
        independent = knn_of_scikit_learn(exported, images, run)
        difference = independent - knn["values"][name]
        print(f"  scikit-learn's k-NN, {name}: {independent:.2f} (less the verdict's: {difference:+.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with the digits")
    parser.add_argument("--source", type=Path, default=PACKAGE, help="folder of Fashion-MNIST's files")
    parser.add_argument("--out", type=Path, required=True, help="folder for all files")
    args = parser.parse_args()
    out = args.out.absolute()
    digits = (args.data / "digits/train").absolute()
    start = out / "start"

    # The start: random weights, then the digits.
    write_random_vit(out / "random")
    pretrain(options(digits, start, out / "random", "random", START_EPOCHS, at_rate(SCRATCH_RATE)))

    cases = {"own": (OWN_EPOCHS, []), "fast": (FAST_EPOCHS, at_rate(FAST_RATE))}
    for part, (name, (epochs, rates)) in enumerate(cases.items()):
        images = out / f"clothes_{part}"
        write_clothes(images, args.source, part)
        continue_on(images, out / name, start, epochs, rates)
    show("at the command's own rate and layer decay", out / "own", start, out / "clothes_0")
    show(f"at {FAST_RATE:g}, without layer decay", out / "fast", start, out / "clothes_1")


if __name__ == "__main__":
    main()
