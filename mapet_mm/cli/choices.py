"""The decisions of `mapet-mm pretrain`: which images, from which start, and what is stored of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mapet_mm.cli.options import PretrainOptions
from mapet_mm.cli.start_models import SIDE, grid_of
from mapet_mm.cli.starts import GRID, PATCH, Start, take_start
from mapet_mm.cli.token_choices import Tokens, Vocabulary, choose_tokens, vocabulary
from mapet_mm.datasets.classes import TEST, TRAIN, VAL
from mapet_mm.datasets.labels import Labels, find_images, labels_of
from mapet_mm.datasets.look import Look, look, size_words
from mapet_mm.datasets.pictures import Reading
from mapet_mm.datasets.tiles import tile_names
from mapet_mm.structures.image_files import file_of
from mapet_mm.utils.disk import GIGABYTE, free_bytes, require_room
from mapet_mm.utils.errors import UserError, listed


@dataclass
class Teacher:
    """What the tokenizer sees of the images: their folder, the transform that reads them, lines about it."""

    folder: Path
    load: dict[str, Any]
    words: list[str]


@dataclass
class Choices:
    """Decisions for the configs, and the lines that tell the user about them.

    A method without tokens has neither `tokens` nor a vocabulary nor a teacher.
    """

    arch: str | None  # of the recipe; None for the network of a start
    start: Start | None
    tokens: Tokens | None
    vocabulary: Vocabulary | None
    stores_squares: bool
    labels: Labels
    words: list[str]
    look: Look
    teacher: Teacher | None
    side: int  # in pixels, of the images that the ViT is trained on
    stored_side: int  # of the squares that are stored, of which crops may be trained on
    grid: int  # patches per side


def choose(args: PretrainOptions) -> Choices:
    """Count the images and decide; weights to start from become RUN/init.pth."""
    arch = args.arch or "small"
    side = args.image_size or SIDE
    grid = GRID
    if not args.init:
        grid = grid_of(side, args.patch_size or PATCH)
    names, words = training_images(args)
    count = len(names)
    labels = labels_of(names, args.labels, args.class_level, args.groups)
    looked = look(files_of(args.images, names), Reading(args.value_range, args.bands, args.page))
    words += looked.words
    method = args.about_method
    teacher = None
    if method.has_tokens:
        teacher = find_teacher(args, names, looked)
        words += teacher.words

    start = None
    if args.init:
        start = take_start(args.init, args.out, args.arch, args.image_size)
        arch = start.arch
        grid = start.grid
        side = start.images.img_size[0] if start.images else side
        words += start.words
        if looked.num_bands != 3:
            words.append(
                f"start: each of {looked.num_bands} bands gets the mean of its patch embedding's red, green "
                f"and blue times 3/{looked.num_bands}"
            )
    if args.tiles is None:
        words += size_words(looked.sizes, side)
    tokens = fit = None
    if method.has_tokens:
        tokens = choose_tokens(args.tokenizer, start, grid)
        fit = vocabulary(count, grid, args.epochs)
        words.append(
            f"tokens: {tokens.words}; {fit.k} centroids, from {fit.positions} of {grid**2} positions per "
            f"image, k-means: {fit.nredo} starts of {fit.niter} iterations"
        )
    model = f"ViT-{arch}" if arch else start.network["model_name"]
    words.append(f"model: {model}, {args.epochs} epochs of {count} images, {args.batch_size} per step")
    if method.start_words:
        words.append(method.start_words)
    stored_side = side if method.has_tokens else side_for_crops(side, looked.sizes, args.tiles)
    needed = count * looked.num_bands * stored_side**2
    stores_squares, squares = choose_squares(args, count, needed)
    words.append(squares)
    return Choices(
        arch, start, tokens, fit, stores_squares, labels, words, looked, teacher, side, stored_side, grid
    )


def side_for_crops(side: int, sizes: Sequence[tuple[int, int]], tiles: tuple[int, int] | None) -> int:
    """Side of the squares of which crops are drawn, in pixels.

    The crop of median area, 60 % of the square, then has the pixels of a network's image, if the pictures or
    tiles have as many.

    Args:
        side: of the network's images.
        sizes: width and height of the pictures.
        tiles: side and overlap of tiles, if the pictures are divided.
    """
    wanted = round(side * 9 / 7)
    own = tiles[0] if tiles else np.median([min(size) for size in sizes or [(wanted, wanted)]])
    return int(min(max(own, side), wanted))


def files_of(folder: Path, names: Sequence[str]) -> list[str]:
    """Paths of the files of images, each once; tiles lie in one."""
    return list(dict.fromkeys(os.path.join(folder, file_of(name)) for name in names))


def find_teacher(args: PretrainOptions, names: Sequence[str], looked: Look) -> Teacher:
    """Where the tokenizer's red, green and blue come from; UserError if an image has no pair."""
    if args.teacher_images is None:
        load = looked.rendition(args.teacher_bands)
        words = []
        if load != looked.load:
            shown = " ".join(map(str, load["bands"]))
            words.append(f"tokenizer: bands {shown} as red, green and blue (others: --teacher-bands)")
        return Teacher(args.images, load, words)
    paths = files_of(args.teacher_images, names)
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        raise UserError(
            f"--teacher-images {args.teacher_images} lacks {len(missing)} of the {len(paths)} images, such "
            f"as {os.path.relpath(missing[0], args.teacher_images)}"
        )
    paired = look(paths)
    return Teacher(args.teacher_images, paired.load, [f"tokenizer: the images in {args.teacher_images}"])


def training_images(args: PretrainOptions) -> tuple[list[str], list[str]]:
    """Names of the images, or of their tiles, and lines about them; UserError if there are none."""
    names, left_out = find_images(args.images)
    words = [f"images: {len(names)}"]
    if left_out:
        words.append(f"other files, left out: {left_out}")
    folders = sorted({name.partition("/")[0] for name in names if "/" in name})
    tests = [folder for folder in folders if folder.lower() in (*VAL, *TEST)]
    if tests and any(folder.lower() in TRAIN for folder in folders):
        words.append(
            f"folders {listed(tests, most=3)}: their images are trained on, too, and then no new ones for a "
            "test (name another folder to leave them out)"
        )
    if args.tiles:
        side, overlap = args.tiles
        tiles, largest = tile_names(args.images, names, side, overlap)
        size = f"{3 * largest / GIGABYTE:.3g} GB"
        words.append(
            f"tiles: {len(tiles)} of {side} px, with an overlap of {overlap}, in {len(names)} files; each "
            f"process that decodes holds one file, of {size} at most, and twice that while it decodes it"
        )
        names = tiles
    return names, words


def choose_squares(args: PretrainOptions, num_images: int, needed: int) -> tuple[bool, str]:
    """Whether to decode each image once and store its square in RUN, and a line that says why.

    It pays from the second epoch on. Half of the free disk stays for checkpoints and other users. Tiles are
    always stored: in random order, each would cost the decoding of its file. So are squares of which crops
    are drawn: that finds the images that cannot be decoded, for which there is no tokenizer.

    Args:
        args: of the command.
        num_images: of the training.
        needed: bytes of their squares.

    Raises:
        UserError: there is no room for what is always stored.
    """
    size = f"{needed / GIGABYTE:.3g} GB"
    if args.tiles:
        remedy = "take larger tiles or less overlap, or another --out"
        require_room(args.out, needed, f"{num_images} tiles", remedy)
        return True, f"squares: each file is decoded once and its tiles stored, in {size}"
    if not args.about_method.has_tokens:
        remedy = "take a smaller --image-size, or another --out"
        require_room(args.out, needed, f"{num_images} squares", remedy)
        return True, f"squares: each image is decoded once and stored, in {size}; epochs crop parts of them"
    if args.epochs == 1:
        return False, "squares: not stored, because one epoch decodes each image once"
    free = free_bytes(args.out)
    if free is None:
        return False, (
            f"squares: not stored, because they need {size} and the disk does not say how much is free: each "
            "epoch decodes all images"
        )
    cost = f"{size}; {free / GIGABYTE:.3g} GB are free"
    if needed > free / 2:
        return False, f"squares: not stored, because they need {cost}: each epoch decodes all images"
    return True, f"squares: each image is decoded once and stored, in {cost}"
