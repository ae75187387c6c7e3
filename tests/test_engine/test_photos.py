"""Photos that EXIF says to turn: training sees them as the tokenizer did, or does not start."""

import shutil

import numpy as np
import pytest
from mmcv.transforms import LoadImageFromFile
from mmpretrain.registry import DATASETS
from PIL import Image

from mapet_mm.engine.hooks.alignment import check_alignment
from mapet_mm.engine.hooks.photos import first_turned, turns_photos
from mapet_mm.structures import TokenStore, TokenStoreError

SQUARE = dict(type="EfficientNetCenterCrop", crop_size=64, crop_padding=0, backend="pillow")


def save(path, orientation: int | None = None) -> None:
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, exif=exif)


class Quartered(LoadImageFromFile):
    """Reads a photo smaller than it is, in other colours."""

    def transform(self, results):
        results = super().transform(results)
        return {**results, "img": 255 - results["img"][::2, ::2]}


class ElsewhereThanInFiles(LoadImageFromFile):
    def transform(self, results):
        return {**results, "img": np.zeros((9, 9, 3), np.uint8)}


@pytest.mark.parametrize(
    ("load", "turns"),
    [
        (LoadImageFromFile(), True),
        (LoadImageFromFile(imdecode_backend="pillow", to_float32=True), True),
        (LoadImageFromFile(color_type="grayscale"), True),
        (LoadImageFromFile(color_type="color_ignore_orientation"), False),
        (LoadImageFromFile(color_type="unchanged"), False),
        (LoadImageFromFile(color_type="unchanged", imdecode_backend="pillow"), False),
        (LoadImageFromFile(backend_args=dict(backend="http")), True),
        (Quartered(), True),
        (ElsewhereThanInFiles(), None),
        (LoadImageFromFile(imdecode_backend="tifffile"), None),
        (LoadImageFromFile(imdecode_backend="tifffile", ignore_empty=True), None),
    ],
)
def test_what_a_loading_step_does_with_a_photo_on_its_side(load, turns):
    before = repr(load)
    assert turns_photos(load, {"img_path": "elsewhere.png", "sample_idx": 3}) is turns
    assert repr(load) == before


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_the_first_turned_photo_is_found(tmp_path, suffix):
    for name, orientation in dict(a=None, b=1, c=8, d=3).items():
        save(tmp_path / f"{name}.{suffix}", orientation)
    paths = [str(tmp_path / f"{name}.{suffix}") for name in "abcd"]
    assert first_turned(paths) == f"`{paths[2]}` is one (orientation 8)"
    assert first_turned(paths[:2]) is None
    assert first_turned([paths[0], "s3://bucket/a.jpg"]) == (
        "`s3://bucket/a.jpg` may be one (FileNotFoundError on looking into it)"
    )


@pytest.fixture
def check(tmp_path):
    """Check a loading step against a store made with another one, of images with these orientations."""

    def run(recorded: dict, load: dict, orientations: tuple) -> None:
        for number, orientation in enumerate(orientations):
            save(tmp_path / f"{number}.jpg", orientation)
        names = [f"{number}.jpg" for number in range(len(orientations))]
        shutil.rmtree(tmp_path / "tokens", ignore_errors=True)
        preprocessing = dict(pipeline=[recorded, SQUARE, dict(type="PackInputs")], data_preprocessor={})
        store = TokenStore.create(tmp_path / "tokens", names, (4, 4), 8, "test", str(tmp_path), preprocessing)
        store.write(range(len(names)), np.zeros((len(names), 4, 4), int))
        tokens = dict(type="mapet_mm.LoadTokenGrid", store=str(store.path))
        pack = dict(type="PackInputs", algorithm_keys=["token_grid"])
        (tmp_path / "names.txt").write_text("\n".join(names))
        config = dict(type="CustomDataset", data_root=str(tmp_path), ann_file="names.txt", with_label=False)
        check_alignment(DATASETS.build(dict(config, pipeline=[load, SQUARE, tokens, pack])), store)

    return run


def loading(**options) -> dict:
    return dict(type="LoadImageFromFile", **options)


def test_a_training_that_leaves_photos_as_they_lie_is_refused_if_there_are_any(check, tmp_path):
    ignoring = loading(color_type="color_ignore_orientation")
    check(loading(), ignoring, (None, 1))
    with pytest.raises(TokenStoreError) as error:
        check(loading(), ignoring, (None, 1, 3))
    words = "LoadImageFromFile(ignore_empty=False, to_float32=False, color_type='{}', "
    words += "imdecode_backend='cv2', backend_args=None)"
    assert str(error.value) == (
        f"{words.format('color_ignore_orientation')} in the pipeline of CustomDataset does not turn photos "
        f"by their EXIF orientation, but the tokenizer of token store `{tmp_path}/tokens` saw them upright, "
        f"and `{tmp_path}/2.jpg` is one (orientation 3): load images as the store records, by "
        f"{words.format('color')}"
    )


def test_a_training_that_turns_photos_is_refused_where_the_tokenizer_did_not(check):
    with pytest.raises(
        TokenStoreError, match=r" turns photos by .* saw them as they lie in their files, and"
    ):
        check(loading(color_type="unchanged"), loading(), (6,))


@pytest.mark.parametrize(
    ("recorded", "load"),
    [
        (loading(), loading(imdecode_backend="pillow")),
        (loading(), loading(color_type="grayscale")),
        (loading(), loading(backend_args=dict(backend="local"))),
        (loading(color_type="unchanged"), loading(color_type="color_ignore_orientation")),
    ],
)
def test_other_differences_between_loading_steps_pass(check, recorded, load):
    check(recorded, load, (3, 6))
