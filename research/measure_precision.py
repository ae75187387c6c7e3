"""Measure what two choices do to k-CLIP's tokens: the tower's precision, and the images of the codebook.

    apt-get install dataset-fashion-mnist && python research/converters/fashion_mnist.py
    export MAPET_MM_DATA=../../../../research/configs/data/fashion_mnist_20000 PYTHONPATH=research
    python tools/train.py research/configs/clip_1xb128-coslr.py --work-dir work_dirs/fashion_mnist_20000/clip
    python research/measure_precision.py

It prints two Markdown tables, mean and standard deviation over seeds of the codebook. "Other ids" are the
validation images' tokens that differ from those of float32 under the same codebook, "inertia" is the mean
squared distance of a validation image's feature, in float32, to its centroid, and "tokens alone" the accuracy
on the validation images of a logistic regression of all training images' tokens, one-hot by position (C is
the best of some on a tenth of the training images).

The precisions are emulated in float32, because no CPU has TF32, and many take 20 times as long for float16.
As on a GPU, sums are those of float32: TF32 rounds the inputs and weights of convolutions, and the other two
also what each layer gives.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from mmengine.config import Config
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from tqdm import tqdm

from mapet_mm.structures import Codebook
from mapet_mm.tokenizers import fit_codebook
from mapet_mm.tokenizers.fit_and_extract import build_images, load_tokenizer
from mapet_mm.tokenizers.image_groups import split
from mapet_mm.tokenizers.sampling import draw_images, draw_positions
from mapet_mm.utils.config import read_config
from mapet_mm.utils.errors import one_line_errors
from mapet_mm.utils.precision import PRECISIONS

CONFIG = "configs/micro/kclip.py"
BITS = 23  # of a float32 after the point
TF32_BITS = 10
STRENGTHS = (0.01, 0.1, 1.0)  # of C
USUAL = "all images, 4 positions"
SAMPLES = {  # share of the training images that a codebook is fitted on, and positions of each
    USUAL: (1.0, 4),
    "a tenth, 40 positions": (0.1, 40),
    "a tenth, 4 positions": (0.1, 4),
}


@dataclass
class Images:
    """The images of a set: its config, and their names and labels (N,) in one order."""

    dataset: dict
    names: list[str]
    labels: np.ndarray


class Tokens(NamedTuple):
    """Ids (N, HW) of the training and of the validation images."""

    train: np.ndarray
    val: np.ndarray


def load_images(cfg: Config, dataset: dict) -> Images:
    """Names and labels of a dataset's images."""
    labels = build_images(cfg, dataset).labels()
    return Images(dataset, list(labels), np.array(list(labels.values())))


def features_of(cfg: Config, images: Images, precision: str) -> Tensor:
    """Features (N, HW, D) of images, in float32, computed as in a precision."""
    named = build_images(cfg, images.dataset)
    tokenizer, loader = load_tokenizer(cfg, named, dict(codebook=None))
    emulate(tokenizer.network, precision)
    indices = list(named.indices_by_name().values())
    groups = [(0, group) for group in split(indices, loader.group_size)]
    features = []
    for group in tqdm(loader.load(groups), desc=precision, total=len(groups)):
        features.append(tokenizer.features(group.inputs)[: len(group.indices)])
    return torch.cat(features)


def emulate(network: nn.Module, precision: str) -> None:
    """Make a CLIP ResNet's layers round their values as they do in a precision on a GPU."""
    if precision == "float32":
        return
    for module in network.modules():
        is_product = isinstance(module, nn.Conv2d | nn.Linear)
        if is_product:
            module.weight.data = rounded(module.weight.data, precision)
        if is_product or (precision != "tf32" and not list(module.children())):
            # What is added between two layers is rounded where the second one gets it.
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0], precision),))
            if precision != "tf32":
                module.register_forward_hook(lambda _, inputs, output: rounded(output, precision))


def rounded(values: Tensor, precision: str) -> Tensor:
    """Values of float32 as a precision has them."""
    if precision != "tf32":
        return values.to(getattr(torch, precision)).float()
    # Ties away from zero, as in the GPU's own conversion.
    dropped = BITS - TF32_BITS
    bits = values.contiguous().view(torch.int32) + (1 << (dropped - 1))
    return bits.bitwise_and(-1 << dropped).view(torch.float32)


def fit(cfg: Config, images: Images, features: Tensor, sample: str, seed: int) -> Codebook:
    """A codebook of a sample of the images' features, as tools/fit_codebook.py fits it."""
    share, positions = SAMPLES[sample]
    indices = {name: index for index, name in enumerate(images.names)}
    drawn = draw_images(indices, round(share * len(indices)), seed)
    rows = []
    for name, index in drawn.items():
        rows.append(features[index, draw_positions(name, seed, features.shape[1], positions)].half())
    options = {name: cfg.codebook[name] for name in ("niter", "nredo", "max_points_per_centroid")}
    return fit_codebook(torch.cat(rows), cfg.codebook.k, seed=seed, **options)


def assign(codebook: Codebook, train: Tensor, val: Tensor) -> Tokens:
    """Tokens of features."""
    return Tokens(codebook.assign(train).numpy(), codebook.assign(val).numpy())


def inertia(codebook: Codebook, features: Tensor) -> float:
    """Mean squared distance of features to their centroids."""
    distances, _ = codebook.nearest(features.flatten(0, 1))
    return float(distances.mean())


class TokensAlone:
    """Logistic regression of tokens; C is chosen once, on the first tokens that it is asked about."""

    def __init__(self, train: Images, val: Images, vocab_size: int) -> None:
        self.train, self.val, self.vocab_size = train, val, vocab_size
        self.strength: float | None = None

    def accuracy(self, tokens: Tokens) -> float:
        """Percent of the validation images that are classified rightly."""
        known = self.one_hot(tokens.train)
        labels = self.train.labels
        if self.strength is None:
            is_held_out = np.arange(len(labels)) % 10 == 0
            fitted_on, judged_on = ~is_held_out, is_held_out
            scores = {}
            for strength in STRENGTHS:
                model = regression(strength).fit(known[fitted_on], labels[fitted_on])
                scores[strength] = model.score(known[judged_on], labels[judged_on])
            print(f"C, accuracy on a tenth of the training images: {scores}", flush=True)
            self.strength = max(scores, key=scores.get)
        model = regression(self.strength).fit(known, labels)
        return 100 * model.score(self.one_hot(tokens.val), self.val.labels)

    def one_hot(self, ids: np.ndarray) -> csr_matrix:
        """Tokens (N, HW) as rows of HW x V with a 1 for each position's id."""
        num_images, num_positions = ids.shape
        columns = ids + self.vocab_size * np.arange(num_positions)
        starts = np.arange(0, ids.size + 1, num_positions)
        shape = (num_images, self.vocab_size * num_positions)
        return csr_matrix((np.ones(ids.size), columns.ravel(), starts), shape)


def regression(strength: float) -> LogisticRegression:
    return LogisticRegression(C=strength, max_iter=1000)


@dataclass
class Measurement:
    """One row of a table for one seed."""

    row: str
    other_ids: float | None
    inertia: float | None
    accuracy: float


def measure(cfg: Config, seeds: int, precisions: Sequence[str]) -> Iterator[Measurement]:
    """Measure each sample in float32, the first precision, and the other precisions."""
    train, val = (load_images(cfg, dataset) for dataset in cfg.dataset)
    alone = TokensAlone(train, val, cfg.codebook.k)
    usual: list[Codebook] = []  # by seed, fitted in float32
    in_float32: list[Tokens] = []
    for precision in precisions:
        known = features_of(cfg, train, precision)
        judged = features_of(cfg, val, precision)
        for seed in range(seeds):
            if precision == "float32":
                for sample in SAMPLES:
                    codebook = fit(cfg, train, known, sample, seed)
                    tokens = assign(codebook, known, judged)
                    if sample == USUAL:
                        usual.append(codebook)
                        in_float32.append(tokens)
                    yield Measurement(sample, None, inertia(codebook, judged), alone.accuracy(tokens))
                continue
            tokens = assign(usual[seed], known, judged)
            share = 100 * float((tokens.val != in_float32[seed].val).mean())
            yield Measurement(precision, share, None, alone.accuracy(tokens))
            if precision != "tf32":
                own = assign(fit(cfg, train, known, USUAL, seed), known, judged)
                yield Measurement(f"{precision}, codebook too", None, None, alone.accuracy(own))


def shown(values: list[float | None], digits: int) -> str:
    """Mean and standard deviation."""
    found = [value for value in values if value is not None]
    if not found:
        return ""
    deviation = f" ± {statistics.stdev(found):.{digits}f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.{digits}f}{deviation}"


@one_line_errors
def main() -> None:
    by_line = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=by_line)
    parser.add_argument("--seeds", type=int, default=3, help="how many codebooks (default %(default)s)")
    parser.add_argument("--starts", type=int, help="of each k-means (default: the config's)")
    parser.add_argument(
        "--others",
        nargs="*",
        default=PRECISIONS[1:],
        choices=PRECISIONS[1:],
        help="beside float32",
    )
    args = parser.parse_args()
    cfg = read_config(CONFIG)
    cfg.codebook.nredo = args.starts or cfg.codebook.nredo
    rows: dict[str, list[Measurement]] = {}
    for measurement in measure(cfg, args.seeds, ["float32", *args.others]):
        print(measurement, flush=True)
        rows.setdefault(measurement.row, []).append(measurement)
    print("|  | other ids (%) | inertia, validation | tokens alone (top-1, %) |")
    print("| --- | ---: | ---: | ---: |")
    for name, found in rows.items():
        other_ids = shown([one.other_ids for one in found], 3)
        distances = shown([one.inertia for one in found], 3)
        print(f"| {name} | {other_ids} | {distances} | {shown([one.accuracy for one in found], 2)} |")


if __name__ == "__main__":
    main()
