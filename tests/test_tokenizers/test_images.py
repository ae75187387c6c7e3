"""Which datasets, pipelines and options of a tokenizer config give tokens, and which are refused."""

from collections.abc import Callable
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
from sklearn.datasets import load_sample_image

from mapet_mm.registry import DATASETS, MODELS
from mapet_mm.tokenizers.images import NamedImages
from mapet_mm.tokenizers.run import run_extract_tokens, run_fit_codebook
from mapet_mm.utils.errors import UserError

ROOT = Path(__file__).parents[2]


def datasets_of(cfg: Config) -> list:
    return [*cfg.dataset, cfg.codebook.dataset]


class Flips(BaseTransform):
    """Flips some images, by a random generator of its own."""

    generator = np.random.default_rng(0)

    def transform(self, results: dict) -> dict:
        if self.generator.random() < 0.5:
            results["img"] = results["img"][:, ::-1].copy()
        return results


class FailsOn(BaseTransform):
    """Does something else with one image."""

    def __init__(self, name: str, result: Callable[[dict], dict | None]) -> None:
        self.name, self.result = name, result

    def transform(self, results: dict) -> dict | None:
        return self.result(results) if results["img_path"].endswith(self.name) else results


@DATASETS.register_module()
class Pixels(BaseDataset):
    """Images in memory."""

    def load_data_list(self) -> list[dict]:
        return [dict(img=np.zeros((32, 32, 3), np.uint8))]


@DATASETS.register_module()
class Unlisted(torch.utils.data.Dataset):
    """One of PyTorch's, which gives samples and no paths."""

    def __init__(self, pipeline: list[dict]) -> None:
        self.pipeline = Compose(pipeline)

    def __len__(self) -> int:
        return 12


def insert(place: int, step: dict) -> Callable[[Config], None]:
    return lambda cfg: [dataset.pipeline.insert(place, step) for dataset in datasets_of(cfg)]


def without(*kinds: str) -> Callable[[Config], None]:
    def change(cfg: Config) -> None:
        for dataset in datasets_of(cfg):
            dataset.pipeline = [step for step in dataset.pipeline if step["type"] not in kinds]

    return change


def replace(**dataset: object) -> Callable[[Config], None]:
    def change(cfg: Config) -> None:
        pipeline = cfg.dataset[0].pipeline
        cfg.dataset = cfg.codebook.dataset = dict(pipeline=pipeline) | dataset
        cfg.data_root = "data"

    return change


def wrap(kind: str, **options: object) -> Callable[[Config], None]:
    def change(cfg: Config) -> None:
        inner = dict(datasets=cfg.dataset) if kind == "ConcatDataset" else dict(dataset=cfg.dataset[0])
        cfg.dataset = cfg.codebook.dataset = dict(type=kind, **options, **inner)
        cfg.data_root = "data"

    return change


def grey(cfg: Config) -> None:
    for dataset in datasets_of(cfg):
        dataset.pipeline[0].color_type = "grayscale"


def two_bit_depths(cfg: Config) -> None:
    pixels = np.random.default_rng(0).integers(0, 2**16, (40, 50, 3), dtype=np.uint16)
    cv2.imwrite(str(Path(cfg.dataset[0].data_root) / "train" / "0" / "006.png"), pixels)
    for dataset in datasets_of(cfg):
        dataset.pipeline[0].color_type, dataset.pipeline[1].backend = "unchanged", "cv2"


def views(cfg: Config) -> None:
    for dataset in datasets_of(cfg):
        load, *steps, pack = dataset.pipeline
        dataset.pipeline = [load, dict(type="MultiView", num_views=1, transforms=[steps]), pack]


def other_roots(cfg: Config) -> None:
    root = cfg.dataset[1].data_root
    cfg.codebook.dataset = cfg.dataset
    cfg.dataset[1].update(data_root=f"{root}/val", data_prefix="", ann_file="../val.txt")


def another_root(cfg: Config) -> None:
    cfg.data_root = f"{cfg.dataset[0].data_root}/val"


REFUSED = [
    (insert(2, dict(type=Flips)), "draws random numbers"),
    (insert(1, dict(type="RandomFlip", prob=0.5)), "draws random numbers"),
    (wrap("RepeatDataset", times=2), "pipeline"),
    (wrap("ConcatDataset"), "pipeline"),
    (replace(type=Unlisted), "get_data_info"),
    (replace(type=Pixels, pipeline=[]), "img_path"),
    (lambda cfg: [dataset.pop("pipeline") for dataset in datasets_of(cfg)], "pipeline"),
    (insert(3, dict(type=FailsOn, name="010.png", result=lambda one: one["no"])), "010.png.*KeyError: 'no'"),
    (insert(3, dict(type=FailsOn, name="010.png", result=lambda one: None)), "010.png"),
    (without("PackInputs"), "000.png"),
    (views, "000.png. as list"),
    (without("ResizeEdge", "CenterCrop"), r"000.png.*\(3, 40, 50\).*\(3, 64, 64\)"),
    (grey, r"\(1, 64, 64\).*color_type='color'"),
    (two_bit_depths, "006.png. as torch.uint16"),
    (other_roots, "data roots"),
    (another_root, "000.png. is not under data_root"),
    (lambda cfg: cfg.update(on_error="Skip"), "on_error"),
    (lambda cfg: cfg.pop("token_store"), "lacks token_store"),
    (lambda cfg: cfg.tokenizer.update(type="VQKD"), "mapet_mm.FrozenTokenizer"),
]


@pytest.mark.parametrize(("change", "noun"), REFUSED)
@pytest.mark.parametrize("run", [run_extract_tokens, lambda cfg: run_fit_codebook(cfg, overwrite=True)])
def test_a_config_that_cannot_give_tokens_is_refused_in_one_line(fitted, change, noun, run):
    change(fitted)
    with pytest.raises(UserError, match=noun) as error:
        run(fitted)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_a_worker_names_the_image(fitted, num_workers):
    fitted.dataloader.num_workers = num_workers
    insert(3, dict(type=FailsOn, name="010.png", result=lambda one: one["no"]))(fitted)
    with pytest.raises(UserError, match=r"010.png` \(KeyError: 'no'\)"):
        run_extract_tokens(fitted)


def test_datasets_of_several_roots_share_one_that_the_config_names(fitted, tmp_path):
    other_roots(fitted)
    fitted.data_root = str(tmp_path / "data")
    assert run_extract_tokens(fitted)[1].images == 17


@DATASETS.register_module()
class Mirrored(CustomDataset):
    """Reads the pixels itself."""

    def prepare_data(self, index: int) -> dict:
        info = self.get_data_info(index)
        return self.pipeline(dict(info, img=cv2.imread(info["img_path"])[:, ::-1].copy()))


def test_tokens_are_of_the_pixels_that_a_dataset_reads_itself(fitted, tmp_path):
    for dataset in fitted.dataset:
        dataset.type = "mapet_mm.Mirrored"
        dataset.pipeline = dataset.pipeline[1:]
    store, _ = run_extract_tokens(fitted)
    for name in ("train/0/000.png", "val/1/004.png"):
        image = Image.open(tmp_path / "data" / name).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        image.save(tmp_path / "mirrored.png")
        assert (store[name] == by_hand(fitted, tmp_path / "mirrored.png")).all()


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
