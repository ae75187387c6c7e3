"""Images that arrive beside other tokens than their own are found by sending test images through."""

import contextlib
import random

import numpy as np
import pytest
import torch
from mmpretrain.registry import DATASETS
from PIL import Image
from skimage import data as photographs

from mapet_mm.engine.hooks.alignment import check_alignment
from mapet_mm.structures import TokenStore, TokenStoreError

LOAD = dict(type="LoadImageFromFile")
KCLIP_PIPELINE = [
    LOAD,
    dict(type="ResizeEdge", scale=448, edge="short", backend="pillow", interpolation="bicubic"),
    dict(type="CenterCrop", crop_size=448),
    dict(type="PackInputs"),
]
SQUARE = dict(type="EfficientNetCenterCrop", crop_size=224, crop_padding=0, backend="pillow")
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


def last_type(steps: list) -> str:
    return steps[-1]["type"] if isinstance(steps, list) else ""


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
    ):
        names = ["small.png" if name == "small" else "cat.png"]
        store = TokenStore.create(root / name, names, grid, 8192, "test", str(root), preprocessing)
        store.write([0], np.zeros((1, *grid), int))
    return root


REFUSED = "the pipeline of CustomDataset moves pixels and not their tokens"


def check(root, steps: list, after: tuple = (), name: str = "recorded", pack=PACK) -> None:
    """Check a pipeline of steps, LoadTokenGrid, and steps after it."""
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
    [LOAD, dict(type="Resize", scale=(224, 224))],
    [LOAD, SQUARE, FLIP],
    [LOAD, SQUARE, dict(FLIP, prob=0.1, direction="vertical")],
    [LOAD, SQUARE, dict(type="RandomCrop", crop_size=224, padding=8)],
    [LOAD, SQUARE, dict(type="RandAugment", policies="timm_increasing", num_policies=2, magnitude_level=9)],
    [LOAD, SQUARE, dict(type="AutoAugment", policies="imagenet")],
    [LOAD, SQUARE, dict(type="RandomApply", transforms=[dict(FLIP, prob=1.0)], prob=0.1)],
    [LOAD, SQUARE, dict(type="RandomChoice", transforms=[[JITTER], [FLIP]], prob=[0.8, 0.2])],
]


@pytest.mark.parametrize("steps", MOVING, ids=last_type)
def test_a_pipeline_that_moves_pixels_and_not_the_grid_is_refused(root, steps):
    with pytest.raises(TokenStoreError, match=REFUSED):
        check(root, steps)


@pytest.mark.parametrize(
    "steps",
    [
        [LOAD, SQUARE, JITTER],
        [LOAD, dict(type="ResizeEdge", scale=224), dict(type="CenterCrop", crop_size=224)],
        [dict(type="RandomChoice", transforms=[[LOAD, SQUARE], [LOAD, SQUARE, JITTER]])],
        [LOAD, SQUARE, dict(type="RandomApply", transforms=[JITTER], prob=0.1)],
        [LOAD, SQUARE, dict(type="Solarize", thr=128, prob=0.5), dict(type="Invert", prob=0.5)],
        [LOAD, SQUARE, dict(type="GaussianBlur", radius=2, prob=0.5), dict(type="RandomGrayscale", prob=0.5)],
        [LOAD, SQUARE, dict(type="RandomErasing", erase_prob=1.0, mode="rand", max_area_ratio=1 / 3)],
        [LOAD, SQUARE, dict(type="Normalize", mean=[120.0] * 3, std=[60.0] * 3)],
        [*PIL_SQUARE, torchvision("ColorJitter", brightness=0.4, hue=0.1), torchvision("ToTensor")],
    ],
    ids=last_type,
)
def test_colours_may_change_and_parts_be_erased(root, steps):
    check(root, steps)


@pytest.mark.parametrize(
    "after",
    [
        [FLIP_GRID],
        [dict(type="mapet_mm.RandomCropTokenGrid", crop_size=(160, 96), patch_size=16)],
        [FLIP_GRID, dict(type="mapet_mm.RandomCropTokenGrid", crop_size=128, patch_size=16), JITTER],
    ],
    ids=last_type,
)
def test_what_moves_image_and_grid_together_passes(root, after):
    check(root, [LOAD, SQUARE], after)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_flip_of_the_image_or_of_the_grid_alone_is_found_beside_one_of_both(root, where):
    def roll(results: dict) -> dict:
        return {**results, "token_grid": np.roll(results["token_grid"], 1, axis=1)}

    steps, after = ([LOAD, SQUARE, FLIP], [FLIP_GRID]) if where == "before" else ([LOAD, SQUARE], [roll])
    with pytest.raises(TokenStoreError, match=REFUSED):
        check(root, steps, after)


def test_the_largest_centred_square_is_what_a_store_without_a_record_covers(root):
    check(root, [LOAD, SQUARE, JITTER], name="plain")
    with pytest.raises(TokenStoreError, match=REFUSED):
        check(root, [LOAD, dict(SQUARE, crop_padding=32)], name="plain")


def test_a_grid_that_is_no_square_covers_the_largest_part_of_its_shape(root):
    tall = [LOAD, dict(type="ResizeEdge", scale=448), dict(type="CenterCrop", crop_size=(224, 448))]
    with pytest.raises(TokenStoreError, match=REFUSED):
        check(root, tall, name="tall")
    check(root, [LOAD, tall_part], name="tall")


def tall_part(results: dict) -> dict:
    height, width = results["img"].shape[:2]
    side = min(height / 2, width)
    top, left = round((height - 2 * side) / 2), round((width - side) / 2)
    image = results["img"][top : top + round(2 * side), left : left + round(side)]
    return {**results, "img": image}


def test_images_that_need_no_crop_are_probed_in_their_own_shape(root):
    """Digits of 24 x 24 px: a pipeline that fails on any other shape is tried on this one."""
    check(root, [LOAD, JITTER], name="small")
    padded = dict(type="RandomTranslatePad", size=30, aug_translate=True)
    with pytest.raises(TokenStoreError, match=REFUSED):
        check(root, [LOAD, padded], name="small")


def test_what_the_tokenizer_saw_is_taken_from_the_store(root, tmp_path):
    """A tokenizer of the whole image, stretched: the centred square is wrong there, and stretching right."""
    stretch = dict(type="Resize", scale=(224, 224))
    store = TokenStore.create(
        root / "stretched", ["cat.png"], (14, 14), 8192, "test", str(root),
        dict(pipeline=[LOAD, stretch, dict(type="PackInputs")], data_preprocessor={}),
    )  # fmt: skip
    store.write([0], np.zeros((1, 14, 14), int))
    check(root, [LOAD, stretch], name="stretched")
    with pytest.raises(TokenStoreError, match=REFUSED):
        check(root, [LOAD, SQUARE], name="stretched")


EXIF = [
    (dict(LOAD, imdecode_backend="pillow"), True),
    (dict(LOAD, color_type="grayscale"), True),
    (dict(LOAD, backend_args=dict(backend="local")), True),
    (dict(LOAD, color_type="color_ignore_orientation"), False),
]


@pytest.mark.parametrize(("load", "upright"), EXIF, ids=lambda value: str(value)[-40:])
def test_photos_have_to_be_turned_as_the_tokenizer_turned_them(root, load, upright):
    with contextlib.nullcontext() if upright else pytest.raises(TokenStoreError, match=REFUSED):
        check(root, [load, SQUARE])


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
def test_a_pipeline_that_takes_no_test_image_is_refused_with_the_reason(root, steps, after, reason):
    with pytest.raises(TokenStoreError, match=rf"no test image .*{reason}.*alignment=False"):
        check(root, steps, after)


def test_a_broken_first_image_does_not_matter(root):
    cat = (root / "cat.png").read_bytes()
    (root / "cat.png").write_bytes(cat[:100])
    check(root, [LOAD, SQUARE])
    with pytest.raises(TokenStoreError, match=REFUSED):
        check(root, [LOAD, SQUARE, FLIP])
    (root / "cat.png").write_bytes(cat)


def test_where_no_grid_arrives_there_is_nothing_to_compare(root):
    check(root, [LOAD, SQUARE, FLIP], pack=dict(type="PackInputs"))


def test_random_states_and_the_pipeline_are_left_as_they_were(root):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    check(root, [LOAD, SQUARE, JITTER])
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


# --- a tokenizer in the model, which gets a view of its own ----------------------------------------------

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
def test_views_of_the_same_patches_pass(root, steps):
    check_views(root, *steps)


@pytest.mark.parametrize(
    "first",
    [[SMALL, FLIP], [dict(type="RandomResizedCrop", scale=112)], [dict(SMALL, crop_padding=32)]],
    ids=last_type,
)
def test_a_step_that_moves_the_pixels_of_one_view_is_refused(root, first):
    with pytest.raises(TokenStoreError, match=REFUSED):
        check_views(root, views(*first))
