"""Images that arrive beside other tokens than their own are found by sending probe images through."""

import random

import numpy as np
import pytest
import torch
from mmcv.transforms import BaseTransform
from mmengine.dataset import Compose
from mmpretrain.registry import DATASETS
from PIL import Image
from skimage import data as photographs

from mapet_mm.engine.hooks.alignment import check_alignment
from mapet_mm.engine.hooks.alignment_patterns import grey, take_the_place
from mapet_mm.models.utils.data_preprocessor import TokenGridDataPreprocessor
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


def check(root, steps: list, after: tuple = (), name: str = "recorded", **options) -> None:
    """Check a pipeline of steps, LoadTokenGrid, and steps after it."""
    load_tokens = dict(type="mapet_mm.LoadTokenGrid", store=str(root / name))
    pipeline = [*steps, load_tokens, *after, options.pop("pack", PACK)]
    (root / "names.txt").write_text("small.png" if name == "small" else "cat.png")
    config = dict(type="CustomDataset", data_root=str(root), ann_file="names.txt", with_label=False)
    dataset = DATASETS.build(dict(config, pipeline=pipeline))
    check_alignment(dataset, TokenStore.open(root / name), **options)


@pytest.mark.parametrize(
    ("steps", "culprit"),
    [
        ([*PIL_SQUARE, torchvision("RandomHorizontalFlip")], "RandomHorizontalFlip"),
        ([*PIL_SQUARE, torchvision("RandomHorizontalFlip", p=0.1)], "RandomHorizontalFlip"),
        ([*PIL_SQUARE[:2], torchvision("RandomResizedCrop", size=224)], "RandomResizedCrop"),
        ([*PIL_SQUARE, torchvision("RandomRotation", degrees=5)], "RandomRotation"),
        (
            [LOAD, dict(type="RandomResizedCropAndInterpolationWithTwoPic", size=224)],
            "RandomResizedCropAndInterpolationWithTwoPic",
        ),
        (
            [LOAD, dict(type="RandomResizedCropAndInterpolationWithTwoPic", size=224, second_size=112)],
            "RandomResizedCropAndInterpolationWithTwoPic",
        ),
        (
            [
                LOAD,
                dict(type="ResizeEdge", scale=200),
                dict(type="CenterCrop", crop_size=200),
                dict(type="RandomTranslatePad", size=224, aug_translate=True),
            ],
            "RandomTranslatePad",
        ),
        ([LOAD, dict(type="ResizeEdge", scale=256), dict(type="CenterCrop", crop_size=224)], "CenterCrop"),
        ([LOAD, dict(SQUARE, crop_padding=32)], "EfficientNetCenterCrop"),
        ([LOAD, dict(SQUARE, crop_padding=8)], "EfficientNetCenterCrop"),
        ([LOAD, dict(type="Resize", scale=(224, 224))], "Resize"),
        ([LOAD, SQUARE, FLIP], "RandomFlip"),
        ([LOAD, SQUARE, dict(FLIP, prob=0.1, direction="vertical")], "RandomFlip"),
        ([LOAD, SQUARE, dict(type="RandomCrop", crop_size=224, padding=8)], "RandomCrop"),
        ([LOAD, SQUARE, dict(type="RandAugment", policies="timm_increasing", num_policies=2,
          magnitude_level=9)], "RandAugment"),
        ([LOAD, SQUARE, dict(type="AutoAugment", policies="imagenet")], "AutoAugment"),
        (
            [LOAD, SQUARE, dict(type="RandomApply", transforms=[dict(FLIP, prob=1.0)], prob=0.1)],
            "RandomApply",
        ),
        (
            [LOAD, SQUARE, dict(type="RandomChoice", transforms=[[JITTER], [FLIP]], prob=[0.8, 0.2])],
            "RandomChoice",
        ),
    ],
    ids=last_type,
)  # fmt: skip
def test_a_pipeline_that_moves_pixels_and_not_the_grid_is_refused_by_name(root, steps, culprit):
    with pytest.raises(TokenStoreError) as error:
        check(root, steps)
    named, _, rest = str(error.value).partition(" in the pipeline of CustomDataset moves pixels but not")
    assert culprit in named
    assert "use RandomFlipTokenGrid or RandomCropTokenGrid" in rest
    assert "\n" not in str(error.value)


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


def test_the_largest_centred_square_is_what_a_store_without_a_record_covers(root):
    check(root, [LOAD, SQUARE, JITTER], name="plain")
    with pytest.raises(TokenStoreError, match=r"^EfficientNetCenterCrop"):
        check(root, [LOAD, dict(SQUARE, crop_padding=32)], name="plain")


def test_a_flip_beside_the_flip_of_both_is_found(root):
    with pytest.raises(TokenStoreError, match=r"^RandomFlip"):
        check(root, [LOAD, SQUARE, FLIP], [FLIP_GRID])


class MovesTheGridAlone(BaseTransform):
    def transform(self, results):
        return {**results, "token_grid": np.roll(results["token_grid"], 1, axis=1)}


def test_a_grid_that_is_moved_without_its_image_is_found(root):
    with pytest.raises(TokenStoreError, match="MovesTheGridAlone in the pipeline"):
        check(root, [LOAD, SQUARE], [MovesTheGridAlone()])


def test_a_grid_that_is_no_square_covers_the_largest_part_of_its_shape(root):
    tall = [LOAD, dict(type="ResizeEdge", scale=448), dict(type="CenterCrop", crop_size=(224, 448))]
    with pytest.raises(TokenStoreError, match="CenterCrop"):
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
    with pytest.raises(TokenStoreError, match=r"^RandomTranslatePad"):
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
    with pytest.raises(TokenStoreError, match=r"^EfficientNetCenterCrop"):
        check(root, [LOAD, SQUARE], name="stretched")


class ReadsWithoutFile(BaseTransform):
    """As from a data base: no file at `img_path`, and a handle that cannot be copied."""

    def __init__(self) -> None:
        self.handle = (number for number in range(10))

    def transform(self, results):
        return {**results, "img": photographs.chelsea(), "img_shape": (300, 451)}


def test_images_need_no_file(root):
    check(root, [ReadsWithoutFile(), SQUARE])
    with pytest.raises(TokenStoreError, match=r"^RandomFlip"):
        check(root, [ReadsWithoutFile(), SQUARE, FLIP])


class FlippingPreprocessor(TokenGridDataPreprocessor):
    def forward(self, data, training=False):
        data = super().forward(data, training)
        return {**data, "inputs": [data["inputs"][0].flip(-1), data["inputs"][1]]}


def test_the_data_preprocessor_is_part_of_the_way(root):
    check(root, [LOAD, SQUARE], preprocessor=TokenGridDataPreprocessor())
    with pytest.raises(TokenStoreError, match="moves pixels"):
        check(root, [LOAD, SQUARE], preprocessor=FlippingPreprocessor())


def test_what_a_probe_cannot_pass_is_said(root):
    with pytest.raises(TokenStoreError, match=r"\(ValueError: the pipeline changes the token ids\)"):
        check(root, [LOAD, SQUARE], after=[new_ids])
    elsewhere = dict(inputs=photographs.chelsea(), token_grid=np.zeros((14, 14), int))
    with pytest.raises(TokenStoreError, match=r"none of its steps reads an image into `img`"):
        check(root, [], pack=lambda results: elsewhere)
    with pytest.raises(TokenStoreError, match=r"\(TypeError: it gives list\)"):
        check(root, [LOAD, SQUARE], pack=lambda results: [results["img"], results["token_grid"]])


def new_ids(results: dict) -> dict:
    return results | {"token_grid": results["token_grid"] + 10**6}


@pytest.mark.parametrize(
    "image",
    [
        Image.new("RGB", (5, 4)),
        Image.new("L", (5, 4)),
        np.zeros((4, 5), np.uint8),
        torch.zeros(3, 4, 5, dtype=torch.uint8),
    ],
    ids=["PIL", "grey PIL", "grey array", "tensor"],
)
def test_a_probe_takes_the_place_of_an_image_of_any_kind_and_is_read_back(image):
    probe = np.random.default_rng(0).integers(0, 256, (6, 8), dtype=np.uint8)
    taken = take_the_place(image, probe)
    assert type(taken) is type(image)
    assert not isinstance(image, Image.Image) or taken.mode == image.mode
    np.testing.assert_array_equal(grey(taken), probe)


def test_an_image_of_an_unknown_kind_is_named():
    with pytest.raises(TypeError, match="the pipeline reads images as bytes"):
        take_the_place(b"pixels", np.zeros((2, 2), np.uint8))


def test_where_no_image_or_no_grid_arrives_there_is_nothing_to_compare(root):
    check(root, [LOAD, SQUARE, FLIP], pack=dict(type="PackInputs", input_key="token_grid"))
    check(root, [LOAD, SQUARE, FLIP], pack=dict(type="PackInputs"))


def test_a_pipeline_that_takes_no_probe_is_refused_with_the_reason(root):
    with pytest.raises(TokenStoreError, match=r"no probe .* \(ValueError: out of order\).*alignment=False"):
        check(root, [LOAD, out_of_order])
    blank = dict(type="Brightness", magnitude=-1.0, prob=1.0, random_negative_prob=0.0)
    with pytest.raises(TokenStoreError, match="all come out blank"):
        check(root, [LOAD, SQUARE, blank])


def out_of_order(results: dict) -> dict:
    raise ValueError("out of order")


def test_random_states_are_left_as_they_were(root):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    check(root, [LOAD, SQUARE, JITTER])
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_the_data_sets_own_pipeline_is_not_touched(root):
    load_tokens = dict(type="mapet_mm.LoadTokenGrid", store=str(root / "plain"))
    config = dict(type="CustomDataset", data_root=str(root), ann_file="names.txt", with_label=False)
    (root / "names.txt").write_text("cat.png")
    dataset = DATASETS.build(dict(config, pipeline=[LOAD, SQUARE, load_tokens, PACK]))
    pipeline, steps, before = dataset.pipeline, list(dataset.pipeline.transforms), dataset[0]["inputs"]
    check_alignment(dataset, TokenStore.open(root / "plain"))
    assert dataset.pipeline is pipeline
    assert isinstance(pipeline, Compose)
    assert pipeline.transforms == steps
    assert (dataset[0]["inputs"] == before).all()
