"""From images to a token store: interrupted, continued, extended, refused."""

import os
import random
import runpy
import shutil
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import open_clip
import pytest
import torch
from few_images import by_hand
from mmcv.transforms import BaseTransform
from mmengine.config import Config
from mmengine.dataset import BaseDataset, Compose
from mmpretrain.datasets import CustomDataset
from PIL import Image
from pretended_gpu import pretended_gpu
from sklearn.datasets import load_sample_image

from mapet_mm.errors import UserError, what_it_says
from mapet_mm.registry import DATASETS, MODELS
from mapet_mm.tokenizers import Codebook, CodebookError, TokenStore, TokenStoreError
from mapet_mm.tokenizers import extraction as extraction_module
from mapet_mm.tokenizers.from_config import (
    build_tokenizer,
    run_extract_tokens,
    run_fit_codebook,
    run_verify_tokens,
)
from mapet_mm.tokenizers.images import NamedImages

ROOT = Path(__file__).parents[2]


def test_every_image_of_every_split_gets_its_own_tokens(cfg, tmp_path):
    path, codebook = run_fit_codebook(cfg)
    store, extraction = run_extract_tokens(cfg)
    assert extraction.images == len(store) == 17
    assert store.missing().size == 0
    assert store.tokenizer == Codebook.load(path).digest == codebook.digest
    assert (store.grid, store.vocab_size, store.data_root) == ((2, 2), 6, str(tmp_path / "data"))
    for name in ("train/0/000.png", "train/2/011.png", "val/1/004.png"):
        assert (store[name] == by_hand(cfg, tmp_path / "data" / name)).all()
    assert len(np.unique([store[name] for name in store.names])) > 1


def test_a_gpu_gives_the_hosts_codebook_and_tokens(cfg, tmp_path):
    run_fit_codebook(cfg)
    store, _ = run_extract_tokens(cfg)
    on_gpu = deepcopy(cfg)
    on_gpu.tokenizer.codebook = str(tmp_path / "gpu" / "codebook.safetensors")
    on_gpu.token_store = str(tmp_path / "gpu" / "tokens")
    with pretended_gpu():
        path, _ = run_fit_codebook(on_gpu)
        assert build_tokenizer(on_gpu)[0].encoder.layer1[0].conv1.weight.is_cuda
        store_of_gpu, _ = run_extract_tokens(on_gpu)
    assert torch.equal(Codebook.load(path).centroids, Codebook.load(cfg.tokenizer.codebook).centroids)
    assert all((store_of_gpu[name] == store[name]).all() for name in store.names)


def test_an_interrupted_extraction_reads_only_what_is_left(cfg, monkeypatch):
    run_fit_codebook(cfg)
    write, seen = TokenStore.write, []

    def stop_at_third(self, rows, grids, skipped):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(list(rows))
        write(self, rows, grids, skipped)

    with monkeypatch.context() as patch:
        patch.setattr(TokenStore, "write", stop_at_third)
        with pytest.raises(KeyboardInterrupt):
            run_extract_tokens(cfg)
    partial = TokenStore.open(cfg.token_store)
    assert partial.missing().tolist() == sorted(set(range(17)) - {row for rows in seen for row in rows})
    kept = {name: partial[name] for row, name in enumerate(partial.names) if partial.written()[row]}
    assert len(kept) == 8

    read = []
    getitem = NamedImages.__getitem__
    monkeypatch.setattr(
        NamedImages, "__getitem__", lambda self, i: (read.append(self.name(i)), getitem(self, i))[1]
    )
    store, extraction = run_extract_tokens(cfg)
    assert extraction.images == len(read) == 9
    assert not set(read) & set(kept)
    assert store.missing().size == 0
    assert all((store[name] == grid).all() for name, grid in kept.items())
    assert str(run_extract_tokens(cfg)[1]) == "all images had their tokens"


def test_a_half_filled_store_is_not_completed_with_other_preprocessing(cfg, monkeypatch):
    run_fit_codebook(cfg)
    whole, _ = run_extract_tokens(cfg)
    names = list(whole.names)
    cfg.token_store += "_half"
    preprocessing, root = whole.preprocessing, whole.data_root
    half = TokenStore.create(cfg.token_store, names, (2, 2), 6, whole.tokenizer, root, preprocessing)
    half.write(range(8), np.array([whole[name] for name in names[:8]]))
    for dataset in cfg.dataset:
        dataset.pipeline[1].interpolation = "bilinear"
    message = r"preprocessed in another way \(pipeline\.1\.interpolation: bicubic, now bilinear\): choose"
    with pytest.raises(TokenStoreError, match=message):
        run_extract_tokens(cfg)
    cfg.dataset[0].pipeline[1].interpolation = "bicubic"
    with pytest.raises(ValueError, match="have different pipelines: give them the same"):
        run_extract_tokens(cfg)
    cfg.dataset[1].pipeline[1].interpolation = "bicubic"
    cfg.data_preprocessor.std = [60.0] * 3
    # As a codebook that does not say how its images were prepared, which would be refused first.
    codebook = Codebook.load(cfg.tokenizer.codebook)
    del codebook.metadata["preprocessing"]
    codebook.save(cfg.tokenizer.codebook)
    with pytest.raises(TokenStoreError, match=r"\(data_preprocessor\.std\.0: 70\.0, now 60\.0\)"):
        run_extract_tokens(cfg)
    cfg.data_preprocessor.std = [70.0] * 3
    assert run_extract_tokens(cfg)[1].images == 9


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (dict(mean=[0.0] * 3), r"data_preprocessor\.mean\.0: 120\.0, now 0\.0"),
        (dict(std=[70.0, 70.0, 1.0]), r"data_preprocessor\.std\.2: 70\.0, now 1\.0"),
        (dict(to_rgb=False), r"data_preprocessor\.to_rgb: True, now False"),
    ],
)
def test_tokens_of_images_normalised_otherwise_than_the_codebooks_are_refused(cfg, change, difference):
    """Before: the tokens were made of other features than the centroids, and nobody said so."""
    run_fit_codebook(cfg)
    run_extract_tokens(Config({**cfg, "token_store": f"{cfg.token_store}_right"}))
    cfg.data_preprocessor.update(change)
    message = rf"was fitted on images prepared in another way \({difference}\): restore .* or fit a codebook"
    with pytest.raises(CodebookError, match=message):
        run_extract_tokens(cfg)
    assert not Path(cfg.token_store).exists()
    cfg.token_store += "_right"
    with pytest.raises(CodebookError, match=message):
        run_verify_tokens(cfg, 0)


def test_a_codebook_is_used_on_images_of_another_pipeline_and_by_another_spelling(cfg):
    """The codebook's images may be cut out in another way, and the config be written in another way."""
    cfg.codebook.dataset.pipeline[2].crop_size = (64, 64)
    run_fit_codebook(cfg)
    cfg.data_preprocessor = dict(
        type="mmpretrain.SelfSupDataPreprocessor", mean=(120, 120, 120), std=[70] * 3, to_rgb=True
    )
    assert run_extract_tokens(cfg)[1].images == 17


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


def test_the_same_names_of_another_folder_do_not_complete_a_store(cfg, tmp_path):
    run_fit_codebook(cfg)
    whole, _ = run_extract_tokens(cfg)
    names = list(whole.names)
    cfg.token_store += "_half"
    root, preprocessing = str(tmp_path / "data"), whole.preprocessing
    TokenStore.create(cfg.token_store, names, (2, 2), 6, whole.tokenizer, root, preprocessing)
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    os.symlink(tmp_path / "data", tmp_path / "link")
    for folder in ("other", "link"):
        for dataset in cfg.dataset:
            dataset.data_root = str(tmp_path / folder)
        if folder == "other":
            with pytest.raises(
                TokenStoreError, match=r"is of images in `.*/data`, the config's are in `.*/oth"
            ):
                run_extract_tokens(cfg)
    assert run_extract_tokens(cfg)[1].images == 17


def test_a_store_of_another_codebook_is_not_continued(cfg):
    run_fit_codebook(cfg)
    store, _ = run_extract_tokens(cfg)
    before = {file: file.read_bytes() for file in store.path.rglob("*.safetensors")}
    cfg.codebook.k = 5
    run_fit_codebook(cfg, overwrite=True)
    with pytest.raises(
        TokenStoreError, match=r"was made by tokenizer .*, but the config's tokenizer is .*: re-extract"
    ):
        run_extract_tokens(cfg)
    assert {file: file.read_bytes() for file in store.path.rglob("*.safetensors")} == before


def test_new_images_extend_a_store(cfg, tmp_path):
    run_fit_codebook(cfg)
    store, _ = run_extract_tokens(cfg)
    old = {name: store[name] for name in store.names}
    Image.new("RGB", (40, 40)).save(tmp_path / "data" / "val" / "0" / "new.png")
    with open(tmp_path / "data" / "val.txt", "a") as lines:
        lines.write("0/new.png 0\n")
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, len(store), store.sealed) == (1, 18, True)
    assert list(store.names) == [*sorted(old), "val/0/new.png"]
    assert all((store[name] == grid).all() for name, grid in old.items())
    assert (store["val/0/new.png"] == by_hand(cfg, tmp_path / "data" / "val/0/new.png")).all()


@pytest.mark.parametrize("change", ["create", "extend_store"])
def test_a_store_that_another_process_makes_or_extends_meanwhile_is_taken(cfg, tmp_path, monkeypatch, change):
    """And where nobody did, why it cannot be made is said."""
    run_fit_codebook(cfg)
    if change == "extend_store":
        run_extract_tokens(cfg)
        Image.new("RGB", (40, 40)).save(tmp_path / "data" / "val" / "0" / "new.png")
        with open(tmp_path / "data" / "val.txt", "a") as lines:
            lines.write("0/new.png 0\n")
    owner = TokenStore if change == "create" else extraction_module
    original = getattr(owner, change)

    def refuse(*arguments, **options):
        raise TokenStoreError("the disk is full")

    def later_than_another(*arguments, **options):
        original(*arguments, **options)
        refuse()

    monkeypatch.setattr(owner, change, refuse)
    with pytest.raises(TokenStoreError, match="the disk is full"):
        run_extract_tokens(cfg)
    monkeypatch.setattr(owner, change, later_than_another)
    store, extraction = run_extract_tokens(cfg)
    assert store.missing().size == 0
    assert extraction.images == (17 if change == "create" else 1)


def test_a_store_of_another_grid_is_refused(cfg, tmp_path):
    _, codebook = run_fit_codebook(cfg)
    TokenStore.create(
        cfg.token_store, ["train/0/000.png"], (4, 4), 6, codebook.digest, str(tmp_path / "data")
    )
    with pytest.raises(TokenStoreError, match=r"has grids of \(4, 4\), the tokenizer gives \(2, 2\): choose"):
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


def test_new_images_of_another_folder_are_refused(cfg, tmp_path):
    run_fit_codebook(cfg)
    run_extract_tokens(cfg)
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    os.rename(tmp_path / "other" / "train" / "0" / "000.png", tmp_path / "other" / "train" / "0" / "a.png")
    lines = (tmp_path / "other" / "train.txt").read_text().replace("0/000.png", "0/a.png")
    (tmp_path / "other" / "train.txt").write_text(lines)
    for dataset in cfg.dataset:
        dataset.data_root = str(tmp_path / "other")
    with pytest.raises(TokenStoreError, match=r"is of images in `.*/data`, the config's are in `.*/other`"):
        run_extract_tokens(cfg)


def test_an_image_in_two_splits_is_tokenised_once(cfg):
    run_fit_codebook(cfg)
    cfg.dataset = [cfg.dataset[0], cfg.dataset[0]]
    assert run_extract_tokens(cfg)[1].images == 12


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


def test_the_papers_preprocessing_is_clips_own_on_a_photograph(tmp_path):
    Image.fromarray(load_sample_image("china.jpg")).save(tmp_path / "a.png")
    cfg = Config.fromfile(ROOT / "configs" / "tokenizers" / "kclip_rn50x64-448px_k8192_in1k.py")
    images = NamedImages(
        dict(type="CustomDataset", data_root=str(tmp_path), with_label=False, pipeline=cfg.pipeline), None
    )
    preprocessor = MODELS.build(cfg.data_preprocessor)
    mine = preprocessor(dict(inputs=images[0][1][None], data_samples=None))["inputs"][0]
    clips = open_clip.image_transform(448, is_train=False)(Image.open(tmp_path / "a.png"))
    assert mine.shape == (3, 448, 448)
    # Less than one of 255 grey levels apart: 1 / 255 / 0.26 = 0.015.
    assert (mine - clips).abs().max() < 1e-4


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


def run_tool(monkeypatch, tool: str, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", [tool, *args])
    runpy.run_path(str(ROOT / "tools" / tool), run_name="__main__")


def test_the_command_lines_say_what_was_written_and_what_comes_next(cfg, tmp_path, monkeypatch, capsys):
    config = str(tmp_path / "tokenizer.py")
    cfg.dump(config)
    run_tool(monkeypatch, "fit_codebook.py", config)
    out, err = capsys.readouterr()
    assert f"wrote {cfg.tokenizer.codebook}: 6 centroids of 256 channels" in out
    assert f"next: python tools/extract_tokens.py {config}" in out
    assert "12/12" in err
    run_tool(monkeypatch, "extract_tokens.py", config, "--cfg-options", "dataloader.num_workers=1")
    out, err = capsys.readouterr()
    assert f"wrote {cfg.token_store}: 2 x 2 tokens of 17 images, 6 ids" in out
    assert "tokenised 17 images in" in out
    assert "next: python tools/train.py" in out
    assert "17/17" in err
    with pytest.raises(SystemExit) as stop:
        run_tool(monkeypatch, "fit_codebook.py", config)
    assert stop.value.code.startswith(f"error: codebook `{cfg.tokenizer.codebook}` exists: add --overwrite")


@pytest.mark.parametrize(
    "config", [*sorted(ROOT.glob("configs/tokenizers/*.py")), ROOT / "configs/micro/kclip.py"]
)
def test_every_tokenizer_config_names_a_next_config_that_reads_its_store(config):
    cfg = Config.fromfile(config)
    following = Config.fromfile(ROOT / cfg.next_config)
    stores = {step.store for step in following.train_dataloader.dataset.pipeline if "store" in step}
    assert stores == {cfg.token_store}
