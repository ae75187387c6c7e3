"""The tutorial "Your own images, by hand" and the section "Images in tar files", followed to the letter."""

import re
import runpy
import shlex
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config
from PIL import Image
from skimage import data as photographs

from mapet_mm.structures import TokenStore
from mapet_mm.structures.codebook import Codebook
from mapet_mm.utils.commands import TOOLS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorials/own_images.md").read_text()
TAR_FILES = (ROOT / "docs/prepare_data.md").read_text().partition("## Images in tar files")[2]
IMAGES = 8
# So small that it takes seconds: these are the only departures from the text.
SMALLER = {
    "fit-codebook": ["codebook.k=16", "codebook.niter=2", "codebook.nredo=1", "dataloader.num_workers=0"],
    "extract-tokens": ["dataloader.num_workers=0"],
    "train": [
        "model.head.vocab_size=16",
        "model.target_generator.vocab_size=16",
        "model.backbone.arch._delete_=True",
        "model.backbone.arch.embed_dims=24",
        "model.backbone.arch.num_layers=1",
        "model.backbone.arch.num_heads=3",
        "model.backbone.arch.feedforward_channels=48",
        "model.head.embed_dims=24",
        "train_dataloader.num_workers=0",
        "train_cfg.max_epochs=1",
    ],
}


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A working folder with the configs, the page's two files among them, and photographs."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    tokens, pretraining, offline = blocks("python")
    tokens = re.sub(r"^tokenizer = .*\n", lambda _: offline, tokens, flags=re.MULTILINE)
    assert "random" in tokens
    write_configs(tmp_path, tokens, pretraining)
    for index in range(IMAGES):
        path = tmp_path / "data/mine/images" / f"album {index % 2}" / f"{index}.{('png', 'jpg')[index % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photographs.chelsea()[20 * index :, :: index + 1]).save(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_configs(folder: Path, *texts: str) -> None:
    """Configs of a page, which begin with their names."""
    for text in texts:
        (folder / re.match(r"# (configs/\S+\.py)\n", text).group(1)).write_text(text)


def in_one_process(command: str) -> str:
    """A command of the page without `--processes N`, which changes no result."""
    return re.sub(r"--processes \d+ ", "", command)


def run(monkeypatch, command: str, options: list[str]) -> None:
    program, name, *arguments = shlex.split(command, comments=True)
    assert program == "mapet-mm"
    tool = str(ROOT / "tools" / TOOLS[name][0])
    monkeypatch.setattr(sys, "argv", [tool, *arguments, "--cfg-options", *options])
    runpy.run_path(tool, run_name="__main__")


def test_your_own_images_lead_to_a_checkpoint_by_the_page_alone(clone, monkeypatch, capsys):
    commands = [line for line in blocks("bash")[0].splitlines() if line]
    assert [command.split()[1] for command in commands] == list(SMALLER)
    out = []
    for command, options in zip(commands, SMALLER.values(), strict=True):
        run(monkeypatch, command, options)
        out.append(capsys.readouterr().out)
    assert Codebook.load("data/mine/codebook.safetensors").k == 16
    store = TokenStore.open("data/mine/tokens")
    assert (len(store), store.vocab_size, store.data_root) == (IMAGES, 16, "data/mine")
    # Each tool names the next of the page's commands, and nothing but data and work folders was written.
    for printed, command in zip(out[:2], commands[1:], strict=True):
        assert f"next: {command.split('#')[0].strip().removesuffix(' --auto-scale-lr')}" in printed
    assert {path.name for path in clone.iterdir()} == {"configs", "data", "work_dirs"}
    (log,) = clone.glob("work_dirs/my_pretraining/*/*.log")
    assert (log.parents[1] / "epoch_1.pth").exists()
    said = log.read_text()
    assert "has tokens for all 8 images" in said
    assert "never a target" not in said
    assert "is meant for a total batch" not in said


def test_images_in_tar_files_lead_to_a_checkpoint_by_the_page_alone(clone, monkeypatch):
    tokens, pretraining = blocks("python", TAR_FILES)
    offline = blocks("python")[-1].replace("data/mine", "data/imagenet21k")
    tokens = re.sub(r"^tokenizer = .*\n", lambda _: offline, tokens, flags=re.MULTILINE)
    assert "random" in tokens
    write_configs(clone, tokens, pretraining)
    (clone / "data/imagenet21k").mkdir()
    with tarfile.open("data/imagenet21k/0.tar", "w") as file:
        file.add("data/mine/images", ".")
    smaller = {**SMALLER, "store-images": ["train_dataloader.num_workers=0"]}
    smaller["train"] = [*SMALLER["train"], "train_dataloader.batch_size=4", "auto_scale_lr=None"]
    for command in map(in_one_process, blocks("bash", TAR_FILES)[0].splitlines()):
        run(monkeypatch, command, smaller[command.split()[1]])
    store = TokenStore.open("data/imagenet21k/tokens")
    assert (len(store), store.names[0]) == (IMAGES, "0.tar/album 0/0.png")
    (log,) = clone.glob("work_dirs/my_shards/*/*.log")
    assert "Epoch(train) [1][2/2]" in log.read_text()
    assert (log.parents[1] / "epoch_1.pth").exists()


def test_a_recipe_of_another_store_is_not_named_as_the_next(clone):
    next_step = runpy.run_path(str(ROOT / "tools" / "extract_tokens.py"))["next_step"]
    store = TokenStore.create("data/mine/others", ["a.png"], (14, 14), 16, "test")
    said = next_step(Config.fromfile("configs/tokenizers/my_kclip.py"), store)
    assert said == (
        "mapet-mm train CONFIG  # with {'type': 'mapet_mm.LoadTokenGrid', 'store': 'data/mine/others'} "
        "in its pipeline and vocab_size=16 in its model; not configs/mapet/my_pretraining.py, which reads "
        "another store"
    )


def test_a_program_of_ones_own_fills_a_store_as_the_page_says(tmp_path, monkeypatch):
    """Interrupted before its first write, and started again, also once it is done."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/tutorials/new_tokenizer.md").read_text()
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "TokenStore" in block
    )
    calls = []

    def my_ids(name: str) -> np.ndarray:
        calls.append(name)
        if calls == ["cats/1.jpg", "cats/2.jpg"]:
            raise KeyboardInterrupt
        return np.full((14, 14), int(name[5]), dtype=np.uint16)

    with pytest.raises(KeyboardInterrupt):
        exec(code, {"my_ids": my_ids})
    for _ in range(2):
        exec(code, {"my_ids": my_ids})
    store = TokenStore.open("data/mine/tokens")
    assert [int(store[name].mean()) for name in ("cats/1.jpg", "cats/2.jpg")] == [1, 2]
    assert (store.missing().size, store.data_root) == (0, "data/mine")
    assert calls == ["cats/1.jpg", "cats/2.jpg"] * 2
