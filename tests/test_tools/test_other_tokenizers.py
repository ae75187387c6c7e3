"""VQ-KD and DALL-E through tools/extract_tokens.py, and training on the tokens that it stores."""

from pathlib import Path

import numpy as np
import pytest
import torch
from config_building import ROOT, load, run_tool
from digits_tokenizer import write_few_digits
from mmengine.registry import MODELS
from mmengine.runner import Runner
from PIL import Image

from mapet_mm.tokenizers import TokenStore
from mapet_mm.tokenizers.fit_and_extract import run_extract_tokens, run_fit_codebook

CONFIGS = ROOT / "configs/micro"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data") / "digits"
    write_few_digits(root, 20)
    return root


def config(name: str, data: Path, store: Path):
    """A digits tokenizer config for 20 images of each split in another folder."""
    cfg = load(CONFIGS / f"{name}.py")
    cfg.token_store, cfg.data_root, cfg.dataloader.num_workers = str(store), str(data), 0
    for dataset in cfg.dataset:
        dataset.update(data_root=str(data), indices=20)
    return cfg


@pytest.mark.parametrize(("name", "size"), [("vqkd", 24), ("dalle", 48)])
def test_stored_grids_are_the_tokenizers_own_tokens(name, size, data, tmp_path):
    cfg = config(name, data, tmp_path / "tokens")
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, store.grid, store.vocab_size) == (40, (6, 6), 128)
    tokenizer = MODELS.build(cfg.tokenizer)
    assert store.tokenizer == tokenizer.digest
    names = [name for name in store.names if name.startswith("val/")]
    for image_name in names[::7]:
        image = Image.open(data / image_name).resize((size, size), Image.Resampling.BICUBIC)
        pixels = (np.asarray(image, dtype=np.float32).transpose(2, 0, 1) - 127.5) / 127.5
        expected = tokenizer(torch.from_numpy(pixels)[None]).view(6, 6).numpy()
        np.testing.assert_array_equal(store[image_name], expected)
    assert run_extract_tokens(cfg)[1].images == 0


def test_there_is_no_codebook_to_fit(data, tmp_path):
    with pytest.raises(ValueError, match="its own codebook"):
        run_fit_codebook(config("vqkd", data, tmp_path / "tokens"))


def test_published_weights_without_a_network_are_one_line(monkeypatch, tmp_path):
    """The ImageNet config, as a user without a file and a network meets it."""
    tokenizer = "configs/tokenizers/vqkd_beit-base-224px_k8192_in1k.py"
    option = "tokenizer.tokenizer.init_cfg.checkpoint=no/such/file.pth"
    with pytest.raises(SystemExit, match=r"no/such/file.pth.* does not exist"):
        run_tool(monkeypatch, "extract_tokens.py", ROOT / tokenizer, "--cfg-options", option)


@pytest.mark.parametrize("model", ["mlp", "vit-micro"])
def test_a_classifier_trains_on_tokens_alone(model, data, tmp_path):
    """No image is opened: the files are gone before the training starts."""
    store, _ = run_extract_tokens(config("vqkd", data, tmp_path / "tokens"))
    cfg = load(CONFIGS / f"token-{model}_vqkd_1xb64-coslr.py")
    bare = tmp_path / "bare"
    (bare / "meta").mkdir(parents=True)
    for split in ("train", "val"):
        lines = (data / "meta" / f"{split}.txt").read_text().splitlines()[:20]
        (bare / "meta" / f"{split}.txt").write_text("\n".join(lines))
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset.data_root = str(bare)
        loader.dataset.pipeline[0].update(store=str(tmp_path / "tokens"), data_root=str(bare))
        loader.collate_fn = dict(type="default_collate")
    cfg.train_cfg = dict(by_epoch=True, max_epochs=2)
    cfg.work_dir = str(tmp_path / "work")
    runner = Runner.from_cfg(cfg)
    runner.train()
    losses, _ = runner.message_hub.get_scalar("train/loss").data
    assert losses[0] == pytest.approx(np.log(10), abs=0.7)
    scalars = runner.message_hub.log_scalars
    assert {"val/accuracy/top1", "val/accuracy/top5"} <= set(scalars)
    assert TokenStore.open(tmp_path / "tokens").tokenizer == store.tokenizer
