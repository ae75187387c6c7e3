"""Which datasets, pipelines and options of a tokenizer config give tokens, and which are refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import open_clip
import pytest
from mmcv.transforms import BaseTransform
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from PIL import Image
from sklearn.datasets import load_sample_image

from mapet_mm.registry import DATASETS, MODELS
from mapet_mm.tokenizers.fit_and_extract import run_extract_tokens, run_fit_codebook
from mapet_mm.tokenizers.images import NamedImages
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


@DATASETS.register_module()
class Pixels(BaseDataset):
    def load_data_list(self) -> list[dict]:
        return [dict(img=np.zeros((32, 32, 3), np.uint8))]


def insert(place: int, step: dict) -> Callable[[Config], None]:
    return lambda cfg: [dataset.pipeline.insert(place, step) for dataset in datasets_of(cfg)]


def without(*kinds: str) -> Callable[[Config], None]:
    def change(cfg: Config) -> None:
        for dataset in datasets_of(cfg):
            dataset.pipeline = [step for step in dataset.pipeline if step["type"] not in kinds]

    return change


def in_memory(cfg: Config) -> None:
    cfg.dataset = cfg.codebook.dataset = dict(type=Pixels, pipeline=cfg.dataset[0].pipeline[-1:])
    cfg.data_root = "data"


def grey(cfg: Config) -> None:
    for dataset in datasets_of(cfg):
        dataset.pipeline[0].color_type = "grayscale"


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
    (in_memory, "img_path"),
    (views, "000.png. as list"),
    (without("ResizeEdge", "CenterCrop"), r"000.png.*\(3, 40, 50\).*\(3, 64, 64\)"),
    (grey, r"\(1, 64, 64\).*color_type='color'"),
    (other_roots, "data roots"),
    (another_root, "000.png. is not under data_root"),
]


@pytest.mark.parametrize(("change", "noun"), REFUSED)
@pytest.mark.parametrize("run", [run_extract_tokens, lambda cfg: run_fit_codebook(cfg, overwrite=True)])
def test_a_config_that_cannot_give_tokens_is_refused_in_one_line(fitted, change, noun, run):
    change(fitted)
    with pytest.raises(UserError, match=noun) as error:
        run(fitted)
    assert "\n" not in str(error.value)


def test_datasets_of_several_roots_share_one_that_the_config_names(fitted, tmp_path):
    other_roots(fitted)
    fitted.data_root = str(tmp_path / "data")
    assert run_extract_tokens(fitted)[1].images == 17


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
