"""`mapet-mm pretrain --method mae`: MMPretrain's MAE on a folder of images, which needs no tokens."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
import timm
import torch
import transformers
from config_building import run_tool
from mmengine.config import Config
from mmengine.dataset import default_collate
from mmengine.registry import DefaultScope
from PIL import Image

import mapet_mm
from mapet_mm.cli import pretrain as command
from mapet_mm.cli.command_options import OptionError
from mapet_mm.cli.finetuning.options import FinetuneOptions
from mapet_mm.cli.finetuning.pretrained import read_run
from mapet_mm.cli.options import PretrainOptions
from mapet_mm.cli.pretrain import pretrain
from mapet_mm.evaluation.models import load_model
from mapet_mm.registry import DATASETS, MODELS
from mapet_mm.structures import TokenStore
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.run_folder import HELD_OUT, Run
from mapet_mm.weight_files import read_weights

SMALL = dict(method="mae", arch="tiny", image_size=16, patch_size=4, epochs=2, batch_size=16, workers=0)
ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)
DECODER = dict(decoder_embed_dim=12, decoder_depth=1, decoder_num_heads=3)
BROKEN = "a/0.png"


def write_photographs(folder: Path) -> Path:
    """Sixty images of noise in two classes, one of them cut off."""
    rng = np.random.default_rng(0)
    for index in range(60):
        path = folder / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (24, 28, 3), np.uint8)).save(path)
    (folder / BROKEN).write_bytes((folder / BROKEN).read_bytes()[:20])
    return folder


def small_stages(stages: list, run: Path, held: object) -> None:
    """Run the stages in this process, on a ViT of two layers."""
    cfg = Run(run).config
    cfg.model.backbone.arch = ARCH
    cfg.model.neck.update(embed_dim=24, **DECODER)
    cfg.dump(run / "pretrain.py")
    for stage in stages:
        _, tool, *words = stage.command
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(run)
            run_tool(patch, Path(tool).name, *words)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """The RUN of a folder of photographs."""
    folder = tmp_path_factory.mktemp("mae")
    images = write_photographs(folder / "photographs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "run_stages", small_stages)
        pretrain(PretrainOptions(images=images, out=folder / "run", **SMALL))
    return Run(folder / "run")


@pytest.fixture
def planned(monkeypatch) -> list:
    """The stages of each `pretrain`, which are not run."""
    plans: list = []
    monkeypatch.setattr(command, "run_stages", lambda stages, *_: plans.append(stages))
    return plans


def test_it_has_neither_tokenizer_nor_tokens_and_leaves_out_what_cannot_be_decoded(run):
    assert not [name for name in ("tokenizer.py", "codebook.safetensors", "tokens") if (run / name).exists()]
    store = TokenStore.open(run.store)
    assert (list(store.skipped), int(store.written().sum()), store.has_tokens) == ([BROKEN], 59, False)
    assert BROKEN in (run / "stored_images/skipped.txt").read_text()
    held_out = set((run / HELD_OUT).read_text().split())
    loader = run.config.train_dataloader
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run)
        dataset = DATASETS.build(loader.dataset)
        item = dataset[0]
    assert len(dataset) == 60 - len(held_out | {BROKEN})
    assert item["inputs"].shape == (3, 16, 16)
    assert "token_grid" not in item["data_samples"]
    # Squares of 9/7 of the side, so that the crop of median area has the network's pixels.
    assert [step.type for step in loader.dataset.pipeline] == [
        "RandomResizedCrop",
        "RandomFlip",
        "PackInputs",
    ]
    assert loader.dataset.pipeline[0].crop_ratio_range == (0.2, 1.0)
    assert loader.dataset["size"] == 21


def test_the_features_of_its_exports_are_the_backbones(run):
    """In timm, in Hugging Face, and as the backbone that `next:` names for an OpenMMLab config."""
    cfg = run.config
    vit = MODELS.build(cfg.model.backbone)
    vit.eval()
    weights = read_weights(run.checkpoint)
    vit.load_state_dict({name: weights[f"backbone.{name}"] for name in vit.state_dict()})
    images = torch.randn(2, 3, 16, 16)
    in_timm = timm.create_model(f"local-dir:{run}/timm", pretrained=True, num_classes=0).eval()
    elsewhere = transformers.AutoModel.from_pretrained(run / "huggingface").eval()
    entry = Config.fromstring(run.backbone, ".py").backbone
    with DefaultScope.overwrite_default_scope("mmseg"):
        backbone = MODELS.build(entry)
    backbone.init_weights()
    backbone.eval()
    with torch.no_grad():
        (tokens,) = vit(images, mask=None)
        close = dict(rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(in_timm.forward_features(images), tokens, **close)
        torch.testing.assert_close(elsewhere(images).last_hidden_state, tokens, **close)
        (feature_map,) = backbone(images)
        torch.testing.assert_close(feature_map.flatten(2).mT, tokens[:, 1:], **close)
        loaded = mapet_mm.load(run.folder).model.eval()
        torch.testing.assert_close(loaded.forward_features(images), tokens, **close)
    assert "layer_scale_init_value=0.0" in run.backbone
    timms = timm.data.resolve_model_data_config(in_timm)
    assert (timms["input_size"], timms["crop_pct"]) == ((3, 16, 16), 1.0)


def test_it_is_judged_evaluated_and_fine_tuned(run):
    assert run.verdict["sentence"].endswith("The method is MMPretrain's MAE, which predicts pixels.")
    page = run.report.read_text()
    assert "--method mae" in page
    assert "Validation:" not in page
    assert "Codebook" not in page
    card = (run / "timm/README.md").read_text()
    assert "--method mae" in card
    assert "tokenizer" not in card
    assert (run / "training/best_knn.pth").is_file()  # the probe has run
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run)
        assert load_model("pretrain.py", str(run.checkpoint)).backbone.network is not None
    pretrained = read_run(FinetuneOptions(run=run.folder, out="out", images=run.folder))
    assert pretrained.backbone["type"] == "mapet_mm.MaPeTViT"
    assert (pretrained.side, pretrained.patch, pretrained.width, pretrained.depth) == (16, 4, 24, 2)


def test_a_step_has_the_loss_of_mmpretrains_mae(run):
    cfg = run.config
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run)
        dataset = DATASETS.build(cfg.train_dataloader.dataset)
        batch = default_collate([dataset[index] for index in range(16)])
    sizes = dict(arch=ARCH, img_size=16, patch_size=4, mask_ratio=0.75)
    initial = [
        dict(type="Xavier", layer="Linear", distribution="uniform"),
        dict(type="Constant", layer="LayerNorm", val=1.0, bias=0.0),
    ]
    theirs = dict(
        type="mmpretrain.MAE",
        backbone=dict(type="MAEViT", **sizes),
        neck=dict(type="MAEPretrainDecoder", num_patches=16, patch_size=4, embed_dim=24, **DECODER),
        head=dict(
            type="MAEPretrainHead",
            norm_pix=True,
            patch_size=4,
            loss=dict(type="PixelReconstructionLoss", criterion="L2"),
        ),
        init_cfg=initial,
        data_preprocessor=dict(
            type="mmpretrain.SelfSupDataPreprocessor",
            mean=[123.675, 116.28, 103.53],
            std=[58.395, 57.12, 57.375],
            to_rgb=True,
        ),
    )
    ours = dict(cfg.model, data_preprocessor=cfg.data_preprocessor)
    losses = []
    for config in (ours, theirs):
        torch.manual_seed(0)
        model = MODELS.build(config)
        model.init_weights()
        torch.manual_seed(1)
        data = model.data_preprocessor(batch, training=True)
        losses.append(model(**data, mode="loss")["loss"].item())
    assert losses[0] == losses[1] > 0


def test_a_training_that_was_killed_goes_on_to_equal_bits(run, monkeypatch, tmp_path):
    shutil.copytree(run.work_dir, tmp_path / "training")
    (tmp_path / "training/epoch_2.pth").unlink()
    (tmp_path / "training/last_checkpoint").write_text(str(tmp_path / "training/epoch_1.pth"))
    monkeypatch.chdir(run)
    run_tool(monkeypatch, "train.py", "pretrain.py", "--work-dir", tmp_path / "training")
    resumed, undisturbed = (
        read_weights(file) for file in (tmp_path / "training/epoch_2.pth", run.checkpoint)
    )
    assert all(torch.equal(resumed[name], value) for name, value in undisturbed.items())


def test_options_of_tokens_and_of_a_start_are_refused():
    for name, value, reason in (
        ("init", "timm:vit_tiny_patch16_224", "starts from random weights: leave --init out"),
        ("tokenizer", "clip", "has no tokens: leave --tokenizer out"),
        ("teacher_bands", (1, 2, 3), "has no tokens: leave --teacher-bands out"),
        ("teacher_images", "folder", "has no tokens: leave --teacher-images out"),
        ("train", "attention", "--train attention needs --init START"),
    ):
        with pytest.raises(OptionError, match=reason):
            PretrainOptions(images="a", out="b", method="mae", **{name: value})


def test_the_rates_are_the_papers_at_its_batch(tmp_path, planned):
    images = write_photographs(tmp_path / "photographs")
    options = {**SMALL, "arch": "base", "epochs": 800, "batch_size": 4096}
    pretrain(PretrainOptions(images=images, out=tmp_path / "run", **options))
    cfg = Run(tmp_path / "run").config
    optimizer = cfg.optim_wrapper.optimizer
    assert (optimizer.lr, tuple(optimizer.betas), optimizer.weight_decay) == (2.4e-3, (0.9, 0.95), 0.05)
    assert cfg.param_scheduler[0].end == 40
    neck = cfg.model.neck
    assert (neck.decoder_depth, neck.decoder_embed_dim, neck.decoder_num_heads) == (8, 512, 16)
    assert [stage.title for stage in planned[0]] == [
        "squares",
        "pre-training",
        "for timm",
        "for Hugging Face",
        "verdict",
    ]


def test_tiles_of_sixteen_bits_and_four_bands_are_trained_on(tmp_path, monkeypatch):
    """Each normalised by what is measured; nothing of the road is of three bands alone."""
    rng = np.random.default_rng(0)
    (tmp_path / "scenes").mkdir()
    for index in range(2):
        values = rng.integers(0, 5000, (32, 48, 4), np.uint16)
        bands = dict(photometric="minisblack", planarconfig="contig")
        tifffile.imwrite(tmp_path / f"scenes/{index}.tif", values, **bands)
    monkeypatch.setattr(command, "run_stages", small_stages)
    options = {**SMALL, "bands": (1, 2, 3, 4), "range": (0, 5000), "tiles": (16, 0), "epochs": 1}
    pretrain(PretrainOptions(images=tmp_path / "scenes", out=tmp_path / "run", no_verdict=True, **options))
    run = Run(tmp_path / "run")
    assert len(TokenStore.open(run.store)) == 12
    assert run.config.train_dataloader.dataset["size"] == 16  # a tile's own pixels
    in_timm = timm.create_model(f"local-dir:{run}/timm", pretrained=True, num_classes=0).eval()
    backbone = MODELS.build(Config.fromstring(run.backbone, ".py").backbone)
    backbone.init_weights()
    backbone.eval()
    images = torch.randn(2, 4, 16, 16)
    with torch.no_grad():
        (feature_map,) = backbone(images)
        tokens = in_timm.forward_features(images)[:, 1:]
    torch.testing.assert_close(feature_map.flatten(2).mT, tokens, rtol=1e-4, atol=1e-5)
    finetuned = read_run(FinetuneOptions(run=run.folder, out="out", images=run.folder))
    assert finetuned.backbone["in_channels"] == 4


def test_more_undecodable_images_than_allowed_end_it_and_repaired_ones_come_back(tmp_path, monkeypatch):
    images = write_photographs(tmp_path / "photographs")
    whole = (images / "b/1.png").read_bytes()
    for index in range(2, 10, 2):
        (images / f"a/{index}.png").write_bytes(whole[:20])
    monkeypatch.setattr(command, "run_stages", lambda stages, *rest: small_stages(stages[:1], *rest))
    options = {**SMALL, "images": images, "out": tmp_path / "run"}
    with pytest.raises(SystemExit) as ended:
        pretrain(PretrainOptions(**options))
    assert "left 5 of 60 images out" in str(ended.value)
    assert "--max-skipped 1" in str(ended.value)
    (images / "a/2.png").write_bytes(whole)
    (images / "a/4.png").write_bytes(whole)
    pretrain(PretrainOptions(max_skipped=0.05, **options))
    store = TokenStore.open(Run(tmp_path / "run").store)
    assert sorted(store.skipped) == ["a/0.png", "a/6.png", "a/8.png"]
    (images / "a/6.png").write_bytes(whole)
    pretrain(PretrainOptions(retry_skipped=True, **options))
    assert sorted(TokenStore.open(store.path).skipped) == ["a/0.png", "a/8.png"]
    with pytest.raises(UserError, match="method"):
        pretrain(PretrainOptions(**{**options, "method": "mapet"}))
