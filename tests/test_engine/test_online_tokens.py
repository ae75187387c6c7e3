"""A tokenizer inside the model gets images as its codebook's were, which show what the model's view shows."""

from types import SimpleNamespace

import pytest
import torch
from mmpretrain.registry import DATASETS
from PIL import Image
from skimage import data as photographs

from mapet_mm.engine.hooks.alignment import check_views
from mapet_mm.engine.hooks.online_tokens import check_normalisation
from mapet_mm.registry import HOOKS, MODELS
from mapet_mm.structures import TokenStoreError
from mapet_mm.structures.codebook import CodebookError
from mapet_mm.tokenizers import KCLIP, Codebook

MEAN, STD = [122.7709383, 116.7460125, 104.09373615], [68.5005327, 66.6321579, 70.32316305]
RECORDED = dict(type="SelfSupDataPreprocessor", mean=MEAN, std=STD, to_rgb=True)
OPTIONS = dict(
    type="mapet_mm.TwoViewDataPreprocessor",
    mean=[0.0] * 3,
    std=[255.0] * 3,
    second_mean=MEAN,
    second_std=STD,
    to_rgb=True,
)
LOAD, PACK = dict(type="LoadImageFromFile"), dict(type="PackInputs")
SQUARE = dict(type="EfficientNetCenterCrop", crop_size=112, crop_padding=0, backend="pillow")
LARGE = dict(SQUARE, crop_size=224)
JITTER = dict(type="ColorJitter", brightness=0.4, contrast=0.4, saturation=0.4)
FLIP = dict(type="RandomFlip", prob=0.5)


@pytest.fixture(scope="module")
def tower() -> KCLIP:
    clip = dict(layers=[1, 1, 1, 1], width=8, image_size=64)
    return KCLIP(clip, dict(type="random", seed=0), stride=16)


@pytest.fixture
def model(tower):
    """Makes a model with a data preprocessor and a tokenizer, whose codebook records this metadata."""

    def make(metadata: dict, **options) -> torch.nn.Module:
        made = torch.nn.Module()
        made.target_generator = tower
        tower.codebook = Codebook(torch.eye(tower.dim), metadata)
        made.data_preprocessor = MODELS.build(OPTIONS | options)
        return made

    return make


RIGHT = dict(preprocessing=dict(data_preprocessor=RECORDED))


@pytest.mark.parametrize(
    "options",
    [
        dict(second_mean=[0.0] * 3),
        dict(second_mean=MEAN[::-1]),
        dict(second_std=[60.0] * 3),
        dict(to_rgb=False),
    ],
    ids=str,
)
def test_another_normalisation_than_the_codebooks_is_refused(model, options):
    made = model(RIGHT, **options)
    with pytest.raises(CodebookError) as error:
        check_normalisation(made)
    assert str(error.value) == (
        f"codebook {made.target_generator.codebook.digest[:12]} of the model's tokenizer was fitted on "
        f"images normalised with mean={MEAN}, std={STD}, to_rgb=True, but TwoViewDataPreprocessor normalises "
        "the tokenizer's view in another way: in `data_preprocessor`, a mapet_mm.TwoViewDataPreprocessor, "
        "set `second_mean`, `second_std` and `to_rgb` accordingly"
    )


@pytest.mark.parametrize(
    ("metadata", "options"),
    [
        (RIGHT, {}),
        (RIGHT, dict(second_mean=[round(value, 2) for value in MEAN])),
        (dict(preprocessing=dict(pipeline=[])), dict(second_mean=[0.0] * 3)),
        ({}, dict(second_mean=[0.0] * 3)),
    ],
)
def test_the_codebooks_normalisation_passes_and_so_does_any_where_it_records_none(model, metadata, options):
    check_normalisation(model(metadata, **options))


def test_models_without_such_a_tokenizer_pass(model):
    check_normalisation(torch.nn.Module())
    made = model(RIGHT)
    made.target_generator.codebook = None
    check_normalisation(made)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    Image.fromarray(photographs.chelsea()[::2, ::2]).save(root / "cat.png")  # 150 x 226
    (root / "names.txt").write_text("cat.png")
    return root


def images(root, steps: list):
    config = dict(type="CustomDataset", data_root=str(root), ann_file="names.txt", with_label=False)
    return DATASETS.build(dict(config, pipeline=[LOAD, *steps, PACK]))


def views(first: list, second: list) -> dict:
    return dict(type="MultiView", num_views=[1, 1], transforms=[first, second])


@pytest.mark.parametrize(
    "steps",
    [
        [views([SQUARE, JITTER], [LARGE])],
        [FLIP, views([SQUARE], [LARGE])],
        [dict(type="RandomResizedCropAndInterpolationWithTwoPic", size=112, second_size=56,
              interpolation="bicubic", second_interpolation="lanczos")],
        [SQUARE],
    ],
    ids=["jitter", "flip of both", "crop of both", "one view"],
)  # fmt: skip
def test_views_of_the_same_patches_pass(root, steps):
    check_views(images(root, steps), (7, 7))


@pytest.mark.parametrize(
    ("first", "culprit"),
    [
        ([SQUARE, FLIP], "RandomFlip(prob=0.5, direction=horizontal)"),
        ([dict(type="RandomResizedCrop", scale=112)], "RandomResizedCrop"),
        ([dict(SQUARE, crop_padding=32)], "EfficientNetCenterCrop"),
    ],
)
def test_a_step_that_moves_the_pixels_of_one_view_is_refused(root, first, culprit):
    with pytest.raises(TokenStoreError) as error:
        check_views(images(root, [views(first, [LARGE])]), (7, 7))
    named, _, rest = str(error.value).partition(" in the pipeline of CustomDataset moves pixels in one of an")
    assert culprit in named
    assert rest.endswith("of the patches match; move both views together, before MultiView")


def test_the_hook_checks_both_before_training(model, root):
    def train(made, steps):
        loader = SimpleNamespace(dataset=images(root, steps))
        runner = SimpleNamespace(iter=0, model=made, train_dataloader=loader, val_loop=None, hooks=[])
        HOOKS.build(dict(type="mapet_mm.TokenStoreCheckHook")).before_train(runner)

    train(model(RIGHT), [views([SQUARE], [LARGE])])
    with pytest.raises(CodebookError, match="fitted on images normalised with"):
        train(model(RIGHT, second_mean=[0.0] * 3), [views([SQUARE], [LARGE])])
    with pytest.raises(TokenStoreError, match="RandomFlip"):
        train(model(RIGHT), [views([SQUARE, FLIP], [LARGE])])
