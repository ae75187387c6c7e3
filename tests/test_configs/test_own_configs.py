"""The whole configs of two pages, of own configs and of MMSegmentation, train, shrunk in size only."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from config_building import ROOT
from dense_folders import write_dense
from mmengine.config import Config
from PIL import Image
from starts import save_run

from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import configure_test, configure_training, load_config
from mapet_mm.structures import TokenStore

PAGE = (ROOT / "docs/own_configs.md").read_text()
TEN_MINUTES = (ROOT / "docs/tutorials/mmsegmentation.md").read_text()
ARCH = dict(_delete_=True, embed_dims=24, num_layers=12, num_heads=3, feedforward_channels=48)
IMAGES = ["a.png", "b.png"]
# The segmentor in small: of width 24, two steps on squares of 64 pixels.
SEGMENTOR = {
    "model.data_preprocessor.size": (64, 64),
    "model.neck.embed_dim": 24,
    "model.neck.norm_cfg.type": "BN",
    "model.decode_head.norm_cfg.type": "BN",
    "model.decode_head.in_channels": [24] * 4,
    "model.decode_head.channels": 16,
    "model.test_cfg": dict(mode="slide", crop_size=(64, 64), stride=(43, 43)),
    "train_dataloader.dataset.pipeline.2.scale": (256, 64),
    "train_dataloader.dataset.pipeline.3.crop_size": (64, 64),
    "val_dataloader.dataset.pipeline.1.scale": (256, 64),
    "test_dataloader.dataset.pipeline.1.scale": (256, 64),
    "param_scheduler": None,  # longer than the training
    "train_cfg.max_iters": 2,
    "train_cfg.val_interval": 2,
    "default_hooks.checkpoint.interval": 2,
}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder of a user's own, with the page's configs."""
    for name, text in re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", PAGE + TEN_MINUTES, re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(config: str, resume: str | None = None, **options) -> Path:
    """Train a config as mapet-mm does; the folder of its checkpoints."""
    cfg = load_config(config, {**without_workers(config), **options}, "run")
    configure_training(cfg, resume)
    build_runner(cfg, "none").train()
    return Path("run")


def without_workers(config: str) -> dict[str, int]:
    """The options that load images in the process itself."""
    loaders = [key for key in Config.fromfile(config) if key.endswith("_dataloader")]
    return {f"{loader}.num_workers": 0 for loader in loaders}


def test_the_pre_training_trains_and_gets_the_check_of_its_tokens(project):
    rng = np.random.default_rng(0)
    for name in IMAGES:
        path = project / "data/mine/images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(240, 300, 3), dtype=np.uint8)).save(path)
    names = [f"images/{name}" for name in IMAGES]
    store = TokenStore.create(
        "data/mine/tokens", names, (14, 14), vocab_size=1024, tokenizer="test", data_root="data/mine"
    )
    store.write([0, 1], rng.integers(1024, size=(2, 14, 14)))

    options = {
        "model.backbone.arch": ARCH,
        "model.head.embed_dims": 24,
        "param_scheduler": None,  # longer than the training
        "train_cfg.max_epochs": 1,
    }
    folder = train("my_pretraining.py", **options)
    assert "has tokens for all 2 images" in next(folder.glob("*/*.log")).read_text()
    weights = torch.load(folder / "epoch_1.pth", weights_only=True)["state_dict"]
    assert weights["head.projection.weight"].shape == (1024, 24)


def test_the_segmentor_starts_from_a_pre_training_and_trains(project):
    from mapet_mm.models import MaPeTPretrainViT

    arch = {key: value for key, value in ARCH.items() if key != "_delete_"}
    vit = MaPeTPretrainViT(arch, img_size=64, cutting_point=5)
    vit.init_weights()
    weights = {f"backbone.{name}": value for name, value in vit.state_dict().items()}
    torch.save(dict(state_dict=weights, meta={}), "pretrained.pth")
    write_dense(project / "data/ade/ADEChallengeData2016", "ade20k", train=2, val=1)
    options = {
        **SEGMENTOR,
        "model.backbone.arch": ARCH,
        "model.backbone.img_size": 64,
        "model.backbone.init_cfg.checkpoint": "pretrained.pth",
    }
    folder = train("my_segmentor.py", **options)
    trained = torch.load(folder / "iter_2.pth", weights_only=True)["state_dict"]
    start = weights["backbone.layers.0.attn.qkv.weight"]
    change = (trained["backbone.layers.0.attn.qkv.weight"] - start).abs().max()
    assert 0 < change < 1e-3  # it began there, and learned at the first layer's rate


def write_own_masks() -> None:
    """An image to train on and one to validate, with masks of three classes."""
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        labels = rng.integers(3, size=(90, 77), dtype=np.uint8)
        for path, pixels in ((f"images/{part}/a.jpg", 80 * labels), (f"masks/{part}/a.png", labels)):
            Path("data/mine", path).parent.mkdir(parents=True)
            Image.fromarray(pixels).save(Path("data/mine", path))


def test_a_recipe_is_inherited_for_own_masks_and_prints_their_miou(project):
    (project / "mapet_mm_configs").symlink_to(ROOT / "configs")
    write_own_masks()
    cfg = Config.fromfile("my_upernet.py")
    assert cfg.model.backbone.init_cfg.checkpoint == "mapet://vit-base-kclip"
    assert cfg.train_dataloader.dataset.pipeline[1].reduce_zero_label is False
    of_segmentor = [key for key in SEGMENTOR if "neck.norm" not in key]
    options = {key: SEGMENTOR[key] for key in of_segmentor}
    options |= {
        "model.backbone.arch": ARCH,
        "model.backbone.img_size": 64,
        "model.backbone.init_cfg": None,
        "auto_scale_lr": None,
        "model.auxiliary_head.norm_cfg.type": "BN",
        "model.auxiliary_head.in_channels": 24,
        "model.auxiliary_head.channels": 16,
    }
    folder = train("my_upernet.py", **options)
    assert "mIoU" in next(folder.glob("*/*.log")).read_text()


@pytest.mark.parametrize("kind", ["dinov2 with registers", "dinov3", "eva02, swiglu"])
def test_a_continued_vit_is_fine_tuned_on_own_masks_resumed_and_tested(project, kind):
    (project / "RUN").mkdir()
    start = save_run(kind, project / "RUN", depth=4)
    write_own_masks()
    options = {**SEGMENTOR, "model.backbone.out_indices": [0, 1, 2, 3]}
    folder = train("my_dino_segmentor.py", **options)
    weights = start.state_dict()
    trained = torch.load(folder / "iter_2.pth", weights_only=True)["state_dict"]
    for name, value in weights.items():
        if name.startswith("timm_model.blocks"):
            change = (trained[f"backbone.{name}"] - value).abs().max()
            assert change < 1e-3, name  # it began there
    assert not trained["backbone.timm_model.blocks.3.mlp.fc2.weight"].equal(
        weights["timm_model.blocks.3.mlp.fc2.weight"]
    )

    longer = {**options, "train_cfg.max_iters": 4}
    train("my_dino_segmentor.py", resume="auto", **longer)
    cfg = load_config("my_dino_segmentor.py", {**without_workers("my_dino_segmentor.py"), **longer}, "run")
    configure_test(cfg, str(folder / "iter_4.pth"))
    runner = build_runner(cfg, "none")
    assert 0 <= runner.test()["mIoU"] <= 100


def test_every_config_of_the_page_spares_a_gpu_the_waits_for_its_host():
    """A fused optimizer leaves bad steps out on the device; losses stay there until the log is written."""
    optimizers = re.findall(r"optimizer=dict\((.*?)\)", PAGE)
    assert len(optimizers) == 3
    assert all("fused=True" in optimizer for optimizer in optimizers)
    assert (
        PAGE.count('runtime_info=dict(type="mapet_mm.LateLogHook")')
        == PAGE.count("\ndefault_hooks = dict(")
        == 3
    )
