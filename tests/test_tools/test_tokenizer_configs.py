"""Tokenizer configs: which datasets, pipelines and options give tokens, and which are refused."""

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from few_images import by_hand
from mmcv.transforms import BaseTransform
from mmengine.config import Config
from mmengine.dataset import BaseDataset, Compose
from mmpretrain.datasets import CustomDataset
from PIL import Image

from mapet_mm.registry import DATASETS, MODELS
from mapet_mm.tokenizers import CodebookError
from mapet_mm.tokenizers.run import (
    run_extract_tokens,
    run_fit_codebook,
    run_verify_tokens,
)
from mapet_mm.utils.errors import UserError, what_it_says


@pytest.mark.parametrize(
    ("place", "step", "said"),
    [
        (1, dict(type="RandomFlip", prob=0.5), r"step 2, RandomFlip,"),
        (3, lambda results: random.random() and results, r"step 4, <lambda>,"),
        (3, lambda results: torch.rand(1) and results, r"step 4, <lambda>,"),
    ],
)
def test_a_pipeline_that_draws_random_numbers_is_refused(cfg, tmp_path, place, step, said):
    """Of NumPy, Python's and torch's generators, whose states are as before. The first image is broken."""
    run_fit_codebook(cfg)
    (tmp_path / "data" / "train" / "0" / "000.png").write_bytes(b"no image")
    for dataset in (*cfg.dataset, cfg.codebook.dataset):
        dataset.pipeline.insert(place, step)
    before = random.getstate(), np.random.get_state()[1:3], torch.get_rng_state()
    for run in (run_extract_tokens, partial(run_fit_codebook, overwrite=True)):
        with pytest.raises(
            UserError, match=rf"^{said} of the pipeline .* draws random numbers: .* remove it"
        ):
            run(cfg)
    after = random.getstate(), np.random.get_state()[1:3], torch.get_rng_state()
    assert before[0] == after[0]
    assert (before[1][0] == after[1][0]).all()
    assert before[1][1] == after[1][1]
    assert torch.equal(before[2], after[2])
    assert not Path(cfg.token_store).exists()


class Flips(BaseTransform):
    """Flips some images, by a random generator of its own."""

    def __init__(self, probability: float) -> None:
        self.generator, self.probability = np.random.default_rng(0), probability

    def transform(self, results: dict) -> dict:
        if self.generator.random() < self.probability:
            results["img"] = results["img"][:, ::-1].copy()
        return results


def test_a_step_with_a_random_generator_of_its_own_is_refused(cfg):
    """Before: a second extraction gave other tokens."""
    run_fit_codebook(cfg)
    for dataset in cfg.dataset:
        dataset.pipeline.insert(2, dict(type=Flips, probability=0.0))
    run_extract_tokens(Config({**cfg, "token_store": f"{cfg.token_store}_right"}))
    for dataset in cfg.dataset:
        dataset.pipeline[2]["probability"] = 0.5
    for run in (run_extract_tokens, partial(run_verify_tokens, count=1)):
        with pytest.raises(
            UserError, match=r"^step 3, Flips, of the pipeline .* draws random numbers: an im"
        ):
            run(cfg)
    assert not Path(cfg.token_store).exists()


@pytest.mark.parametrize("run", [run_extract_tokens, partial(run_fit_codebook, overwrite=True)])
def test_a_name_with_a_line_break_is_refused_before_anything_is_computed(cfg, tmp_path, monkeypatch, run):
    """Before: it broke the codebook's features for good."""
    run_fit_codebook(cfg)
    broken = tmp_path / "data" / "train" / "2" / "a\nb.png"
    os.rename(broken.with_name("011.png"), broken)
    for dataset in (*cfg.dataset, cfg.codebook.dataset):
        dataset.update(ann_file="", with_label=False)
    monkeypatch.setattr(MODELS.get("KCLIP"), "features", None)
    with pytest.raises(UserError) as error:
        run(cfg)
    assert str(error.value) == f"the name of image {str(broken)!r} contains a line break: rename it"


@pytest.mark.parametrize("with_root", [False, True])
@pytest.mark.parametrize(
    "wrapper", [dict(type="RepeatDataset", times=2), dict(type="ConcatDataset"), dict(type="KFoldDataset")]
)
def test_data_sets_of_data_sets_are_refused_with_what_to_do(cfg, tmp_path, wrapper, with_root):
    """Before: KeyError 'pipeline'."""
    run_fit_codebook(cfg)
    inner = dict(datasets=cfg.dataset) if wrapper["type"] == "ConcatDataset" else dict(dataset=cfg.dataset[0])
    cfg.dataset = cfg.codebook.dataset = dict(wrapper, **inner)
    if with_root:
        cfg.data_root = str(tmp_path / "data")
    message = rf"dataset {wrapper['type']} has no pipeline of its own: list the datasets that it wraps"
    for run in (run_extract_tokens, partial(run_fit_codebook, overwrite=True)):
        with pytest.raises(UserError, match=message):
            run(cfg)


def test_a_data_set_without_a_pipeline_is_refused(cfg):
    run_fit_codebook(cfg)
    del cfg.dataset[1]["pipeline"]
    with pytest.raises(UserError, match=r"dataset CustomDataset of .* has no `pipeline`: give it one"):
        run_extract_tokens(cfg)


def test_an_empty_line_in_the_list_of_images_is_named(cfg, tmp_path):
    """Before: the data root was said to be outside the data root."""
    (tmp_path / "data" / "list.txt").write_text("train/0/000.png\n\ntrain/1/001.png\n")
    listed = dict(
        type="CustomDataset", data_root=str(tmp_path / "data"), ann_file="list.txt", with_label=False
    )
    cfg.dataset = cfg.codebook.dataset = dict(listed, pipeline=cfg.dataset[0].pipeline)
    with pytest.raises(UserError) as error:
        run_fit_codebook(cfg)
    assert str(error.value) == (
        f"image `{tmp_path}/data/` is a folder: remove the empty line from the dataset's list of images"
    )


def test_an_image_outside_the_data_root_is_named(cfg, tmp_path):
    run_fit_codebook(cfg)
    cfg.data_root = str(tmp_path / "data" / "val")
    with pytest.raises(ValueError, match=r"image `.*train/0/000\.png` is not under data_root `.*val`"):
        run_extract_tokens(cfg)


@pytest.mark.parametrize(
    ("section", "option", "match"),
    [
        (
            "dataloader",
            dict(batch_size=4),
            "config's `dataloader` has batch_size: it takes num_workers",
        ),
        (
            "codebook",
            dict(iterations=4),
            "config's `codebook` has unknown settings iterations: it takes",
        ),
        (
            "dataloader",
            dict(group_size=0),
            r"`dataloader\.group_size` of .* is 0: give an integer of at least 1",
        ),
        ("dataloader", dict(num_workers=-1), r"`dataloader\.num_workers` of .* is -1: .* at least 0"),
        ("codebook", dict(k=6.0), r"`codebook\.k` of .* is 6\.0: give an integer of at least 1"),
        ("codebook", dict(k=0), r"`codebook\.k` of .* is 0: give an integer of at least 1"),
        ("codebook", dict(niter=0), r"`codebook\.niter` of .* is 0: give an integer of at least 1"),
        ("codebook", dict(nredo=0), r"`codebook\.nredo` of .* is 0: give an integer of at least 1"),
        ("codebook", dict(max_points_per_centroid=-1), r"`codebook\.max_points_per_centroid` of .* is -1"),
        ("codebook", dict(seed=-1), r"`codebook\.seed` of .* is -1: give an integer of at least 0"),
        ("codebook", dict(positions_per_image="4"), r"`codebook\.positions_per_image` of .* is '4': give an"),
    ],
)
def test_an_option_that_there_is_not_or_that_is_out_of_range_is_refused(cfg, section, option, match):
    cfg[section].update(option)
    with pytest.raises((ValueError, UserError), match=match):
        run_fit_codebook(cfg)


def test_a_codebook_without_a_number_of_centroids_is_refused(cfg):
    del cfg.codebook["k"]
    with pytest.raises(CodebookError, match="`codebook` of `None` has no `k`: give it, the number of centr"):
        run_fit_codebook(cfg)


def test_data_roots_that_differ_are_refused(cfg, tmp_path):
    cfg.dataset[1].data_root = str(tmp_path / "data" / "val")
    cfg.dataset[1].data_prefix = ""
    cfg.dataset[1].ann_file = "../val.txt"
    run_fit_codebook(cfg)
    with pytest.raises(ValueError, match="set `data_root` in the config"):
        run_extract_tokens(cfg)
    cfg.data_root = str(tmp_path / "data")
    assert run_extract_tokens(cfg)[1].images == 17


def test_a_config_without_tokenizer_is_refused():
    with pytest.raises(
        ValueError, match="is no tokenizer config, it lacks tokenizer, data_preprocessor, dataset"
    ):
        run_extract_tokens(Config(dict(codebook={}, token_store="x")))


@DATASETS.register_module()
class Pixels(BaseDataset):
    def load_data_list(self) -> list[dict]:
        return [dict(img=np.zeros((32, 32, 3), np.uint8))]


def test_images_in_memory_are_refused_with_what_to_do(cfg):
    run_fit_codebook(cfg)
    cfg.dataset = cfg.codebook.dataset = dict(type=Pixels, data_root="data", pipeline=[])
    for run in (run_extract_tokens, partial(run_fit_codebook, overwrite=True)):
        with pytest.raises(UserError, match=r"images of Pixels have no `img_path`: .* into a folder first"):
            run(cfg)


class FailsOn(BaseTransform):
    """Fails on one image."""

    def __init__(self, name: str, result: Callable[[dict], dict | None]) -> None:
        self.name, self.result = name, result

    def transform(self, results: dict) -> dict | None:
        return self.result(results) if results["img_path"].endswith(self.name) else results


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (lambda results: results["no such key"], "KeyError: 'no such key'"),
        (lambda results: None, "TypeError: argument of type 'NoneType' is not iterable"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_image_on_which_the_pipeline_fails_is_named(cfg, tmp_path, result, reason, num_workers):
    """Before: the error alone, of one image among all; in a worker, the traceback without the image."""
    run_fit_codebook(cfg)
    cfg.dataloader.num_workers = num_workers
    for dataset in cfg.dataset:
        dataset.pipeline.insert(3, dict(type=FailsOn, name="010.png", result=result))
    with pytest.raises(UserError) as error:
        run_extract_tokens(cfg)
    image = tmp_path / "data" / "train" / "1" / "010.png"
    assert what_it_says(error.value) == (
        f"the pipeline fails on image `{image}` ({reason}): correct the pipeline in the config's `dataset`, "
        "or remove the image"
    )


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda load, *steps, pack: [load, *steps], "NoneType"),
        (
            lambda load, *steps, pack: [load, dict(type="MultiView", num_views=1, transforms=[steps]), pack],
            "list",
        ),
    ],
)
def test_a_pipeline_that_gives_no_tensor_is_refused(cfg, change, kind, num_workers):
    """Before: images in views were passed over, and counted as tokenised; KeyError without PackInputs."""
    run_fit_codebook(cfg)
    cfg.dataloader.num_workers = num_workers
    for dataset in (*cfg.dataset, cfg.codebook.dataset):
        *steps, pack = dataset.pipeline
        dataset.pipeline = change(*steps, pack=pack)
    for run in (run_extract_tokens, partial(run_fit_codebook, overwrite=True)):
        with pytest.raises(UserError) as error:
            run(cfg)
        assert what_it_says(error.value).endswith(
            f"000.png` as {kind}, not as a tensor `inputs`: end it with PackInputs, on one view of the image"
        )
    assert not Path(cfg.token_store).exists()


@DATASETS.register_module()
class Mirrored(CustomDataset):
    """Reads the pixels itself."""

    def prepare_data(self, index: int) -> dict:
        info = self.get_data_info(index)
        return self.pipeline(dict(info, img=cv2.imread(info["img_path"])[:, ::-1].copy()))


def test_tokens_are_of_the_pixels_that_a_data_set_of_ones_own_reads(cfg, tmp_path):
    """Before: what the dataset says of an image went into the pipeline without its pixels."""
    cfg.codebook.dataset.type = "mapet_mm.Mirrored"
    for dataset in (*cfg.dataset, cfg.codebook.dataset):
        dataset.type = "mapet_mm.Mirrored"
        dataset.pipeline = dataset.pipeline[1:]
    run_fit_codebook(cfg)
    store, _ = run_extract_tokens(cfg)
    for name in ("train/0/000.png", "val/1/004.png"):
        image = Image.open(tmp_path / "data" / name).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image.save(tmp_path / "mirrored.png")
        assert (store[name] == by_hand(cfg, tmp_path / "mirrored.png")).all()


@DATASETS.register_module()
class Unlisted(torch.utils.data.Dataset):
    """One of PyTorch's, which gives samples and no paths."""

    def __init__(self, pipeline: list[dict]) -> None:
        self.pipeline = Compose(pipeline)

    def __len__(self) -> int:
        return 12


def test_a_data_set_that_has_no_paths_is_refused_with_what_to_do(cfg):
    cfg.dataset = cfg.codebook.dataset = dict(type=Unlisted, pipeline=cfg.dataset[0].pipeline)
    message = r"^dataset Unlisted does not say where .*: derive it from MMEngine's BaseDataset$"
    with pytest.raises(UserError, match=message):
        run_fit_codebook(cfg)
