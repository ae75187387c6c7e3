"""Images that arrive beside other tokens than their own are found by sending test images through."""

import random

import numpy as np
import pytest
import torch
from mmpretrain.registry import DATASETS
from PIL import Image
from skimage import data as photographs

from mapet_mm.datasets.alignment import check_alignment
from mapet_mm.structures import TokenStore, TokenStoreError

LOAD = dict(type="LoadImageFromFile")
KCLIP_PIPELINE = [
    LOAD,
    dict(type="ResizeEdge", scale=448, edge="short", backend="pillow", interpolation="bicubic"),
    dict(type="CenterCrop", crop_size=448),
    dict(type="PackInputs"),
]
SQUARE = dict(type="EfficientNetCenterCrop", crop_size=224, crop_padding=0, backend="pillow")
STRETCH = dict(type="Resize", scale=(224, 224))
JITTER = dict(type="ColorJitter", brightness=0.4, contrast=0.4, saturation=0.4)
FLIP = dict(type="RandomFlip", prob=0.5)
FLIP_GRID = dict(type="mapet_mm.RandomFlipTokenGrid")
PACK = dict(type="PackInputs", algorithm_keys=["token_grid"])


def torchvision(name: str, **options) -> dict:
    return dict(type=f"torchvision/{name}", **options)


PIL_SQUARE = [
    LOAD,
    dict(type="NumpyToPIL"),
    torchvision("Resize", size=224),
    torchvision("CenterCrop", size=224),
]


def last_type(case: list | tuple) -> str:
    steps = case[0] if isinstance(case, tuple) else case
    return steps[-1]["type"] if isinstance(steps, list) and isinstance(steps[-1], dict) else ""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    Image.fromarray(photographs.chelsea()[::2, ::2]).save(root / "cat.png")  # 150 x 226
    Image.fromarray(photographs.chelsea()[:24, :24]).save(root / "small.png")
    for name, grid, preprocessing in (
        ("recorded", (14, 14), dict(pipeline=KCLIP_PIPELINE, data_preprocessor={})),
        ("plain", (14, 14), None),
        ("small", (6, 6), None),
        ("tall", (14, 7), None),
        (
            "stretched",
            (14, 14),
            dict(pipeline=[LOAD, STRETCH, dict(type="PackInputs")], data_preprocessor={}),
        ),
    ):
        names = ["small.png" if name == "small" else "cat.png"]
        store = TokenStore.create(root / name, names, grid, 8192, "test", str(root), preprocessing)
        store.write([0], np.zeros((1, *grid), int))
    return root


REFUSED = "the pipeline of CustomDataset moves pixels and not their tokens"


def check(root, steps: list, after: tuple = (), name: str = "recorded", pack=PACK) -> None:
    load_tokens = dict(type="mapet_mm.LoadTokenGrid", store=str(root / name))
    (root / "names.txt").write_text("small.png" if name == "small" else "cat.png")
    config = dict(type="CustomDataset", data_root=str(root), ann_file="names.txt", with_label=False)
    dataset = DATASETS.build(dict(config, pipeline=[*steps, load_tokens, *after, pack]))
    before = list(dataset.pipeline.transforms)
    check_alignment(dataset, TokenStore.open(root / name).grid)
    assert dataset.pipeline.transforms == before


MOVING = [
    [*PIL_SQUARE, torchvision("RandomHorizontalFlip")],
    [*PIL_SQUARE, torchvision("RandomHorizontalFlip", p=0.1)],
    [*PIL_SQUARE[:2], torchvision("RandomResizedCrop", size=224)],
    [*PIL_SQUARE, torchvision("RandomRotation", degrees=5)],
    [LOAD, dict(type="RandomResizedCropAndInterpolationWithTwoPic", size=224)],
    [LOAD, dict(type="RandomResizedCropAndInterpolationWithTwoPic", size=224, second_size=112)],
    [
        LOAD,
        dict(type="ResizeEdge", scale=200),
        dict(type="CenterCrop", crop_size=200),
        dict(type="RandomTranslatePad", size=224, aug_translate=True),
    ],
    [LOAD, dict(type="ResizeEdge", scale=256), dict(type="CenterCrop", crop_size=224)],
    [LOAD, dict(SQUARE, crop_padding=32)],
    [LOAD, dict(SQUARE, crop_padding=8)],
    [LOAD, STRETCH],
    [LOAD, SQUARE, FLIP],
    [LOAD, SQUARE, dict(FLIP, prob=0.1, direction="vertical")],
    [LOAD, SQUARE, dict(type="RandomCrop", crop_size=224, padding=8)],
    [LOAD, SQUARE, dict(type="RandAugment", policies="timm_increasing", num_policies=2, magnitude_level=9)],
    [LOAD, SQUARE, dict(type="AutoAugment", policies="imagenet")],
    [LOAD, SQUARE, dict(type="RandomApply", transforms=[dict(FLIP, prob=1.0)], prob=0.1)],
    [LOAD, SQUARE, dict(type="RandomChoice", transforms=[[JITTER], [FLIP]], prob=[0.8, 0.2])],
]


def roll(results: dict) -> dict:
    return {**results, "token_grid": np.roll(results["token_grid"], 1, axis=1)}


# With steps behind LoadTokenGrid, or another store.
MOVING_TOO = [
    ([LOAD, SQUARE, FLIP], [FLIP_GRID]),  # the image alone, beside a flip of both
    ([LOAD, SQUARE], [roll]),  # the grid alone
    ([LOAD, dict(SQUARE, crop_padding=32)], (), "plain"),
    ([LOAD, dict(type="ResizeEdge", scale=448), dict(type="CenterCrop", crop_size=(224, 448))], (), "tall"),
    ([LOAD, dict(type="RandomTranslatePad", size=30, aug_translate=True)], (), "small"),
    ([LOAD, SQUARE], (), "stretched"),
    ([dict(LOAD, color_type="color_ignore_orientation"), SQUARE],),
]


@pytest.mark.parametrize("case", [*((steps,) for steps in MOVING), *MOVING_TOO], ids=last_type)
def test_a_pipeline_that_moves_pixels_and_not_the_grid_is_refused(root, case):
    with pytest.raises(TokenStoreError, match=REFUSED):
        check(root, *case)


def test_a_step_that_moves_pixels_in_one_of_64_draws_is_refused(root):
    draws = set()

    def flip_at_the_last(results: dict) -> dict:
        draws.add(random.random())  # the same for an image and its negative
        image = results["img"]
        return results | {"img": image[:, ::-1] if len(draws) == 64 else image}

    with pytest.raises(TokenStoreError, match=REFUSED):
        check(root, [LOAD, SQUARE, flip_at_the_last])


COLOURS = [
    [LOAD, SQUARE, JITTER],
    [LOAD, dict(type="ResizeEdge", scale=224), dict(type="CenterCrop", crop_size=224)],
    [dict(type="RandomChoice", transforms=[[LOAD, SQUARE], [LOAD, SQUARE, JITTER]])],
    [LOAD, SQUARE, dict(type="RandomApply", transforms=[JITTER], prob=0.1)],
    [LOAD, SQUARE, dict(type="Solarize", thr=128, prob=0.5), dict(type="Invert", prob=0.5)],
    [LOAD, SQUARE, dict(type="GaussianBlur", radius=2, prob=0.5), dict(type="RandomGrayscale", prob=0.5)],
    [LOAD, SQUARE, dict(type="RandomErasing", erase_prob=1.0, mode="rand", max_area_ratio=1 / 3)],
    [LOAD, SQUARE, dict(type="Normalize", mean=[120.0] * 3, std=[60.0] * 3)],
    [*PIL_SQUARE, torchvision("ColorJitter", brightness=0.4, hue=0.1), torchvision("ToTensor")],
]


def tall_part(results: dict) -> dict:
    height, width = results["img"].shape[:2]
    side = min(height / 2, width)
    top, left = round((height - 2 * side) / 2), round((width - side) / 2)
    image = results["img"][top : top + round(2 * side), left : left + round(side)]
    return {**results, "img": image}


# Image and grid move together, the store says what the tokenizer saw, or it is the largest part of its shape.
TOGETHER = [
    ([LOAD, SQUARE], [FLIP_GRID]),
    ([LOAD, SQUARE], [dict(type="mapet_mm.RandomCropTokenGrid", crop_size=(160, 96), patch_size=16)]),
    (
        [LOAD, SQUARE],
        [FLIP_GRID, dict(type="mapet_mm.RandomCropTokenGrid", crop_size=128, patch_size=16), JITTER],
    ),
    ([LOAD, SQUARE, JITTER], (), "plain"),
    ([LOAD, tall_part], (), "tall"),
    (
        [LOAD, JITTER],
        (),
        "small",
    ),  # 24 x 24 px: a pipeline that fails on any other shape is tried on this one
    ([LOAD, STRETCH], (), "stretched"),
    # Photos are turned as the tokenizer turned them.
    ([dict(LOAD, imdecode_backend="pillow"), SQUARE],),
    ([dict(LOAD, color_type="grayscale"), SQUARE],),
    ([dict(LOAD, backend_args=dict(backend="local")), SQUARE],),
    ([LOAD, SQUARE, FLIP], (), "recorded", dict(type="PackInputs")),  # no grid arrives
]


@pytest.fixture
def few_draws(monkeypatch) -> None:
    """Two for each shape: all are made, where nothing is found."""
    monkeypatch.setattr("mapet_mm.datasets.alignment.DRAWS", 8)


@pytest.mark.parametrize("case", [*((steps,) for steps in COLOURS), *TOGETHER], ids=last_type)
def test_what_leaves_pixels_with_their_tokens_passes(root, case, few_draws):
    check(root, *case)


# `pretrain --init` with a ViT of 32 px in 8 x 8 patches and `--tokenizer random`, whose images have 128 px.
FINE = dict(backend="pillow", interpolation="bicubic")


def cut(side: int, crop: int = 32, **options) -> list:
    edge = dict(FINE, **options)
    return [
        LOAD,
        dict(type="ResizeEdge", scale=side, edge="short", **edge),
        dict(type="CenterCrop", crop_size=crop),
    ]


@pytest.fixture(scope="module")
def fine(tmp_path_factory):
    """As CIFAR-10's pictures, and one that is cropped."""
    root = tmp_path_factory.mktemp("fine")
    Image.fromarray(photographs.chelsea()[:32, :32]).save(root / "cat.png")
    seen = dict(pipeline=[*cut(128, 128), dict(type="PackInputs")], data_preprocessor={})
    store = TokenStore.create(root / "fine", ["cat.png"], (8, 8), 8192, "test", str(root), seen)
    store.write([0], np.zeros((1, 8, 8), int))
    return root


@pytest.mark.parametrize(
    "steps",
    [cut(32), cut(32, interpolation="bilinear"), cut(32, backend="cv2"), [LOAD, dict(SQUARE, crop_size=32)]],
)
def test_patches_of_four_pixels_pass_with_their_tokens(fine, steps, few_draws):
    check(fine, steps, name="fine")


@pytest.mark.parametrize(
    "steps",
    [
        cut(33),
        cut(34),
        [*cut(32), dict(type="RandomCrop", crop_size=32, padding=1)],
        [*cut(32), FLIP],
        [LOAD, dict(type="Resize", scale=(32, 32))],
    ],
)
def test_patches_of_four_pixels_that_are_a_pixel_off_are_refused(fine, steps, few_draws):
    with pytest.raises(TokenStoreError, match=REFUSED):
        check(fine, steps, name="fine")


def new_ids(results: dict) -> dict:
    return results | {"token_grid": results["token_grid"] + 10**6}


def out_of_order(results: dict) -> dict:
    raise ValueError("out of order")


BLANK = dict(type="Brightness", magnitude=-1.0, prob=1.0, random_negative_prob=0.0)
UNTESTED = [
    ([LOAD, out_of_order], (), "out of order"),
    ([LOAD, SQUARE, BLANK], (), "blank"),
    ([LOAD, SQUARE], [new_ids], "IndexError"),
    ([lambda results: dict(results, img=photographs.chelsea()), SQUARE], (), "blank"),
    ([LOAD], (), "px arrive"),
]


@pytest.mark.parametrize(("steps", "after", "reason"), UNTESTED, ids=lambda value: str(value)[:20])
def test_a_pipeline_that_takes_no_test_image_is_refused_with_the_reason(
    root, steps, after, reason, few_draws
):
    with pytest.raises(TokenStoreError, match=rf"no test image .*{reason}.*alignment=False"):
        check(root, steps, after)


def test_a_broken_first_image_does_not_matter(root, few_draws):
    cat = (root / "cat.png").read_bytes()
    (root / "cat.png").write_bytes(cat[:100])
    check(root, [LOAD, SQUARE])
    with pytest.raises(TokenStoreError, match=REFUSED):
        check(root, [LOAD, SQUARE, FLIP])
    (root / "cat.png").write_bytes(cat)


def test_random_states_and_the_pipeline_are_left_as_they_were(root, few_draws):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    check(root, [LOAD, SQUARE, JITTER])
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


# A tokenizer in the model, which gets a view of its own.
SMALL, LARGE = dict(SQUARE, crop_size=112), SQUARE


def check_views(root, *steps: dict) -> None:
    (root / "names.txt").write_text("cat.png")
    config = dict(type="CustomDataset", data_root=str(root), ann_file="names.txt", with_label=False)
    check_alignment(DATASETS.build(dict(config, pipeline=[LOAD, *steps, dict(type="PackInputs")])), (7, 7))


def views(*first: dict) -> dict:
    return dict(type="MultiView", num_views=[1, 1], transforms=[list(first), [LARGE]])


TWO_CROPS = dict(type="RandomResizedCropAndInterpolationWithTwoPic", size=112, second_size=56)


@pytest.mark.parametrize(
    "steps", [[views(SMALL, JITTER)], [FLIP, views(SMALL)], [TWO_CROPS], [SMALL]], ids=str
)
def test_views_of_the_same_patches_pass(root, steps, few_draws):
    check_views(root, *steps)


@pytest.mark.parametrize(
    "first",
    [[SMALL, FLIP], [dict(type="RandomResizedCrop", scale=112)], [dict(SMALL, crop_padding=32)]],
    ids=last_type,
)
def test_a_step_that_moves_the_pixels_of_one_view_is_refused(root, first):
    with pytest.raises(TokenStoreError, match=REFUSED):
        check_views(root, views(*first))
