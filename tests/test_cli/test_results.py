"""`mapet-mm pretrain` takes a result for done by what it was made from, not by its path."""

from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image

from mapet_mm.cli.results import codebook_there, export_there, note_export, tokens_there, training_there
from mapet_mm.engine.runners.resume import recipe
from mapet_mm.tokenizers import Codebook, TokenStore
from mapet_mm.tokenizers.run import preprocessing_of
from mapet_mm.utils.config import read_config
from mapet_mm.utils.errors import UserError

PIXELS = np.zeros((4, 4, 3), dtype=np.uint8)
TOKENIZER = """
data_root = "photos"
token_store = "tokens"
tokenizer = dict(type="mapet_mm.KCLIP", codebook="codebook.safetensors")
data_preprocessor = dict(type="SelfSupDataPreprocessor", mean=[1.0], std=[2.0])
pipeline = [dict(type="LoadImageFromFile"), dict(type="CenterCrop", crop_size=4)]
images = dict(type="CustomDataset", data_root=data_root, data_prefix="", with_label=False, pipeline=pipeline)
dataset = [images]
codebook = dict(dataset=images, k=2, seed=0)
"""
PRETRAINING = """
model = dict(type="MaPeT", cutting_point=98)
optim_wrapper = dict(optimizer=dict(type="AdamW", lr=0.1))
train_dataloader = dict(num_workers=2)
"""


@pytest.fixture(autouse=True)
def _tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for name in ("a.png", "b.png"):
        Image.fromarray(PIXELS).save(f"photos/{name}")
    Path("tokenizer.py").write_text(TOKENIZER)


def write_store(seal: bool = True) -> None:
    store = TokenStore.create("tokens", ["a.png", "b.png", "cut.png"], (1, 1), 2, "digest", "photos")
    if seal:
        store.write([0, 1], np.zeros((2, 1, 1), dtype=np.int64), {2: "truncated"})


def codebook() -> str | None:
    return codebook_there(*map(Path, ("codebook.safetensors", "tokenizer.py", "tokens", "training")))


def tokens() -> str | None:
    return tokens_there(*map(Path, ("tokens", "tokenizer.py", "epoch_2.pth")))


def test_a_codebook_of_other_settings_is_refused_and_kept():
    assert codebook() is None
    cfg = read_config("tokenizer.py")
    metadata = {"k": 2, "seed": 0, "niter": 20, "preprocessing": preprocessing_of(cfg, cfg.dataset)}
    Codebook(np.eye(2, 3), metadata).save("codebook.safetensors")
    assert codebook() == ""
    Path("tokenizer.py").write_text(TOKENIZER.replace("k=2", "k=4").replace("crop_size=4", "crop_size=8"))
    with pytest.raises(UserError) as raised:
        codebook()
    assert str(raised.value) == (
        "codebook.safetensors was made with another `k`, `preprocessing` than tokenizer.py has: restore it "
        "there, or, to make all anew, remove codebook.safetensors, tokens and training"
    )


def test_tokens_of_a_codebook_that_is_gone_are_refused():
    """A new codebook's would be others, and the store's counted as there."""
    write_store()
    with pytest.raises(
        UserError, match=r"^tokens has the tokens of a codebook that is gone: bring codebook\.saf"
    ):
        codebook()


def test_tokens_are_there_once_the_store_is_complete():
    assert tokens() is None
    write_store(seal=False)
    assert tokens() is None


def test_images_added_before_the_end_of_the_training_need_tokens():
    write_store()
    assert tokens() == ""
    Image.fromarray(PIXELS).save("photos/c.png")
    assert tokens() is None


def test_images_that_changed_after_the_training_are_told(tmp_path):
    write_store()
    Path("epoch_2.pth").touch()
    assert tokens() == ""
    Image.fromarray(PIXELS).save("photos/c.png")
    Path("photos/a.png").unlink()
    assert tokens() == (
        "images no longer there: 1; images added since: 1, which the model has not seen; another --out "
        "trains on them"
    )


def test_a_training_says_what_of_its_config_has_changed_since():
    config, checkpoint = Path("pretrain.py"), Path("epoch_2.pth")
    config.write_text(PRETRAINING)
    assert training_there(checkpoint, config) is None
    torch.save({"meta": {"recipe": recipe(Config.fromfile(config))}}, checkpoint)
    config.write_text(PRETRAINING.replace("num_workers=2", "num_workers=0") + "compile = True\n")
    assert training_there(checkpoint, config) == ""
    config.write_text(PRETRAINING.replace("lr=0.1", "lr=0.2"))
    assert training_there(checkpoint, config) == (
        "trained with another `optim_wrapper` than pretrain.py has: another `work_dir` there trains anew"
    )


def test_an_export_is_there_with_all_its_files_and_of_this_checkpoint():
    folder, first, last = Path("timm"), Path("epoch_2.pth"), Path("epoch_3.pth")
    for number, checkpoint in enumerate((first, last)):
        torch.save({"state_dict": {"weight": torch.full((2,), float(number))}}, checkpoint)
    folder.mkdir()
    for name in ("model.safetensors", "config.json"):
        (folder / name).touch()
    assert export_there(folder, first) is None  # it may be half-written, or of an earlier checkpoint
    note_export(folder, first)
    assert (export_there(folder, first), export_there(folder, last)) == ("", None)
    assert export_there(Path("huggingface"), first) is None
    first.write_bytes(last.read_bytes())  # trained anew under the same name
    assert export_there(folder, first) is None
    note_export(folder, last)
    (folder / "config.json").unlink()
    assert export_there(folder, last) is None
