"""From images to a token store: interrupted, shared, extended, verified, refused, and at ImageNet's size."""

import json
import os
import random
import shutil
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from config_building import run_tool
from few_images import by_hand
from mmengine.config import Config
from PIL import Image

from mapet_mm.structures import Codebook, CodebookError, TokenStore, TokenStoreError
from mapet_mm.structures.parts import Parts
from mapet_mm.structures.token_store import PART_ROWS
from mapet_mm.tokenizers import tokens
from mapet_mm.tokenizers.fill import ImageGroup
from mapet_mm.tokenizers.fit_and_extract import run_extract_tokens, run_fit_codebook, run_verify_tokens
from mapet_mm.tokenizers.images import NamedImages
from mapet_mm.tokenizers.tokens import extract_tokens
from mapet_mm.utils.errors import UserError


def parts_of(path: str | Path) -> list[bytes]:
    """Whole ones: a process killed while it writes leaves a file of another name."""
    return [file.read_bytes() for file in sorted(Path(path, "parts").glob("*.safetensors"))]


def store_without_tokens(cfg: Config, like: TokenStore, names=None, grid=(2, 2)) -> TokenStore:
    """At the config's path, with another store's identity."""
    identity = (grid, 6, like.tokenizer, like.data_root, like.preprocessing)
    return TokenStore.create(cfg.token_store, list(names or like.names), *identity)


@pytest.fixture
def flushed(monkeypatch) -> None:
    """Each group of images is written at once."""
    monkeypatch.setattr(tokens, "FLUSH_SECONDS", -1.0)


@pytest.fixture
def read(monkeypatch) -> list[str]:
    seen, getitem = [], NamedImages.__getitem__

    def noted(images: NamedImages, index: int):
        seen.append(images.names()[index])
        return getitem(images, index)

    monkeypatch.setattr(NamedImages, "__getitem__", noted)
    monkeypatch.setattr(NamedImages, "require_repeatable", lambda images: None)
    return seen


def test_every_image_of_every_split_gets_its_own_tokens(fitted, tmp_path):
    store, extraction = run_extract_tokens(fitted)
    assert extraction.images == len(store) == 17
    assert store.missing().size == 0
    assert store.tokenizer == Codebook.load(fitted.tokenizer.codebook).digest
    assert (store.grid, store.vocab_size, store.data_root) == ((2, 2), 6, str(tmp_path / "data"))
    for name in ("train/0/000.png", "train/2/011.png", "val/1/004.png"):
        assert (store[name] == by_hand(fitted, tmp_path / "data" / name)).all()
    assert len(np.unique([store[name] for name in store.names])) > 1
    assert str(run_extract_tokens(fitted)[1]) == "all images had their tokens"


def test_an_interrupted_extraction_reads_only_what_is_left(fitted, flushed, read, monkeypatch):
    update, updates = Parts.update, []

    def stop_at_third(self, *changes):
        if len(updates) == 2:
            raise KeyboardInterrupt
        updates.append(changes)
        update(self, *changes)

    with monkeypatch.context() as patch:
        patch.setattr(Parts, "update", stop_at_third)
        with pytest.raises(KeyboardInterrupt):
            run_extract_tokens(fitted)
    partial = TokenStore.open(fitted.token_store)
    assert partial.missing().tolist() == list(range(8, 17))
    read.clear()
    store, extraction = run_extract_tokens(fitted)
    assert read == list(store.names)[8:]
    assert (extraction.images, store.missing().size) == (9, 0)
    whole = Config({**fitted, "token_store": f"{fitted.token_store}_whole"})
    run_extract_tokens(whole)
    assert parts_of(whole.token_store) == parts_of(fitted.token_store)


def test_what_killed_writers_left_long_ago_is_removed(fitted):
    store, _ = run_extract_tokens(fitted)
    old, new = (store.path / "parts" / f".00000.{name}.partial" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"a part")
    os.utime(old, (0, 0))
    run_extract_tokens(fitted)
    assert (old.exists(), new.exists()) == (False, True)


def test_tokens_that_another_process_writes_meanwhile_are_not_made_again(fitted, flushed, read, monkeypatch):
    whole, _ = run_extract_tokens(Config({**fitted, "token_store": f"{fitted.token_store}_whole"}))
    read.clear()
    store = store_without_tokens(fitted, whole)
    update = Parts.update

    def with_the_other(self, *changes):
        update(store.parts, 0, range(17), [whole[name] for name in whole.names], {})
        update(self, *changes)

    monkeypatch.setattr(Parts, "update", with_the_other)
    run_extract_tokens(fitted)
    assert read == list(whole.names)[:4]
    assert parts_of(fitted.token_store) == parts_of(whole.path)


def test_an_extraction_whose_store_is_replaced_stops(fitted, flushed, monkeypatch):
    update, replaced = Parts.update, []

    def after_the_other(self, *changes):
        if not replaced:
            names = list(self.names)
            shutil.rmtree(self.folder)
            replaced.append(TokenStore.create(self.folder, names, (2, 2), 6, "other"))
        update(self, *changes)

    monkeypatch.setattr(Parts, "update", after_the_other)
    with pytest.raises(TokenStoreError, match="replaced while it was in use"):
        run_extract_tokens(fitted)
    assert TokenStore.open(fitted.token_store).missing().size == 17


@pytest.mark.slow
def test_twenty_kills_at_random_moments_cost_nothing_but_time(fitted, flushed):
    run_extract_tokens(fitted)
    other = Config({**fitted, "token_store": f"{fitted.token_store}_killed"})
    draws = random.Random(0)
    for _ in range(20):
        if not (child := os.fork()):
            run_extract_tokens(other)
            os._exit(0)
        time.sleep(draws.uniform(0.0, 0.5))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if Path(other.token_store).exists():
            TokenStore.open(other.token_store).verify()
    run_extract_tokens(other)
    assert parts_of(other.token_store) == parts_of(fitted.token_store)


def test_new_images_extend_a_store(fitted, tmp_path):
    store, _ = run_extract_tokens(fitted)
    old = {name: store[name] for name in store.names}
    Image.new("RGB", (40, 40)).save(tmp_path / "data" / "val" / "0" / "new.png")
    with open(tmp_path / "data" / "val.txt", "a") as lines:
        lines.write("0/new.png 0\n")
    store, extraction = run_extract_tokens(fitted)
    assert (extraction.images, list(store.names)) == (1, [*sorted(old), "val/0/new.png"])
    assert all((store[name] == grid).all() for name, grid in old.items())
    assert (store["val/0/new.png"] == by_hand(fitted, tmp_path / "data" / "val/0/new.png")).all()


@pytest.mark.parametrize("change", ["create", "extend_store"])
def test_a_store_that_another_process_makes_or_extends_meanwhile_is_taken(fitted, monkeypatch, change):
    """And where nobody did, the reason why it cannot be made is shown."""
    if change == "extend_store":
        few = deepcopy(fitted)
        few.dataset = few.dataset[0]
        run_extract_tokens(few)
    owner = TokenStore if change == "create" else tokens
    original = getattr(owner, change)

    def refuse(*arguments, **options):
        raise TokenStoreError("the disk is full")

    def later_than_another(*arguments, **options):
        original(*arguments, **options)
        refuse()

    monkeypatch.setattr(owner, change, refuse)
    with pytest.raises(TokenStoreError, match="the disk is full"):
        run_extract_tokens(fitted)
    monkeypatch.setattr(owner, change, later_than_another)
    store, extraction = run_extract_tokens(fitted)
    assert store.missing().size == 0
    assert extraction.images == (17 if change == "create" else 5)


def test_images_of_another_config_are_left_to_it(fitted):
    whole, _ = run_extract_tokens(Config({**fitted, "token_store": f"{fitted.token_store}_whole"}))
    store_without_tokens(fitted, whole)
    every, fitted.dataset = fitted.dataset, [fitted.dataset[0], fitted.dataset[0]]
    _, extraction = run_extract_tokens(fitted)
    assert (extraction.images, extraction.pending) == (12, 5)
    assert str(extraction).endswith("; 5 images of the store have no tokens yet")
    fitted.dataset = every
    assert run_extract_tokens(fitted)[1].images == 5


def changed(options: dict) -> Callable[[Config], None]:
    return lambda cfg: cfg.merge_from_dict(options)


RESIZE = "dataset.{}.pipeline.1.interpolation"


def move(cfg: Config) -> Path:
    """The images lie in another folder now, which is returned."""
    root = Path(cfg.dataset[0].data_root)
    for dataset in cfg.dataset:
        dataset.data_root = f"{root}2"
    return root.rename(f"{root}2")


def other_images(cfg: Config) -> None:
    for path in move(cfg).rglob("*.png"):
        Image.open(path).rotate(180).save(path)


def earlier_version(cfg: Config) -> None:
    manifest = Path(cfg.token_store, "manifest.json")
    recorded = json.loads(manifest.read_text())
    del recorded["files"]
    manifest.write_text(json.dumps(recorded))
    move(cfg)


def other_codebook(cfg: Config) -> None:
    book = Codebook.load(cfg.tokenizer.codebook)
    Codebook(book.centroids[:5], book.metadata).save(cfg.tokenizer.codebook)


def store_of_another_grid(cfg: Config) -> None:
    before = TokenStore.open(cfg.token_store)
    shutil.rmtree(cfg.token_store)
    store_without_tokens(cfg, before, ["train/0/000.png"], grid=(4, 4))


MIXED = [
    (changed({"data_preprocessor.std": [60.0] * 3}), CodebookError, r"std\.0: 70\.0, now 60\.0"),
    (changed({RESIZE.format(i): "bilinear" for i in (0, 1)}), TokenStoreError, "bicubic, now bilinear"),
    (changed({RESIZE.format(0): "bilinear"}), UserError, "different pipelines"),
    (other_images, TokenStoreError, r"token store .* was made of another image `.*png` than .*data2"),
    (earlier_version, TokenStoreError, "data_root: .*data, now .*data2"),
    (other_codebook, TokenStoreError, "made by tokenizer .* but the config's"),
    (changed({"tokenizer.precision": "bfloat16"}), TokenStoreError, "in bfloat16"),
    (store_of_another_grid, TokenStoreError, "grid"),
]


def test_images_that_lie_elsewhere_go_on_from_features_codebook_and_store(cfg, read):
    path, codebook = run_fit_codebook(cfg)
    run_extract_tokens(cfg)
    root = move(cfg)
    if "dataset" in cfg.codebook:
        cfg.codebook.dataset.data_root = str(root)
    Image.open(root / "val/0/000.png").rotate(180).save(root / "val/0/005.png")
    with open(root / "val.txt", "a") as file:
        file.write("0/005.png 0\n")
    read.clear()
    assert run_fit_codebook(cfg)[1].digest == codebook.digest
    path.unlink()
    assert run_fit_codebook(cfg)[1].digest == codebook.digest  # of the features that are there
    assert not read
    store, extraction = run_extract_tokens(cfg)
    assert (extraction.images, read, store.data_root) == (1, ["val/0/005.png"], str(root))


@pytest.mark.parametrize(("change", "error", "noun"), MIXED)
def test_a_store_is_not_completed_with_other_tokens(fitted, change, error, noun):
    run_extract_tokens(fitted)
    change(fitted)
    before = parts_of(fitted.token_store)
    with pytest.raises(error, match=noun):
        run_extract_tokens(fitted)
    assert parts_of(fitted.token_store) == before


def test_a_good_store_is_verified_and_tokens_of_other_images_are_found(fitted, tmp_path):
    store, _ = run_extract_tokens(fitted)
    assert run_verify_tokens(fitted, 5)[1].startswith("0 of 20 tokens of 5 images")
    assert run_verify_tokens(fitted, 100)[1] == "0 of 68 tokens of 17 images differ from fresh ones"
    name = store.names[3]
    store.write([3], [(store[name].astype(int) + 1) % 6])
    with pytest.raises(TokenStoreError, match=rf"4 of 4 tokens of image `.*{name}` differ"):
        run_verify_tokens(fitted, 100)
    (tmp_path / "data" / name).write_bytes(b"no image")
    with pytest.raises(TokenStoreError, match="could not be decoded"):
        run_verify_tokens(fitted, 100)
    (part,) = (store.path / "parts").iterdir()
    os.truncate(part, 3000)
    with pytest.raises(TokenStoreError, match="damaged"):
        run_verify_tokens(fitted, 0)


def test_a_twentieth_of_an_images_tokens_may_differ(fitted, tmp_path, monkeypatch, capsys):
    """As ties between centroids do on another device; in another image more tokens differ."""
    fitted.tokenizer.stride = 8  # 8 x 8 tokens
    fitted.tokenizer.codebook = str(tmp_path / "codebook.safetensors")
    fitted.dump(tmp_path / "config.py")
    for tool in ("fit_codebook.py", "extract_tokens.py"):
        run_tool(monkeypatch, tool, tmp_path / "config.py")
    store = TokenStore.open(fitted.token_store)
    verify = "extract_tokens.py", tmp_path / "config.py", "--verify", "100"

    def change(num_tokens: int) -> None:
        grid = store[store.names[3]].astype(int)
        grid.flat[:num_tokens] = (grid.flat[:num_tokens] + 1) % 6
        store.write([3], [grid])

    change(3)
    run_tool(monkeypatch, *verify)
    assert "3 of 1088 tokens of 17 images differ from fresh ones" in capsys.readouterr().out
    change(4)  # the first three for the second time
    with pytest.raises(SystemExit, match=rf"4 of 64 tokens of image `.*{store.names[3]}` differ"):
        run_tool(monkeypatch, *verify)


class FreeLoader:
    """A loader whose images cost nothing; it counts what happens between the second part and the last."""

    group_size, waited = 256, 0.0

    def __init__(self, parts: int) -> None:
        self.parts, self.calls, self.peak = parts, 0, 0

    def load(self, groups):
        seen = set()
        for part, places in groups:
            if part not in seen:
                seen.add(part)
                if len(seen) == 2:
                    tracemalloc.start()
                    sys.setprofile(self._count)
                if len(seen) == self.parts:
                    sys.setprofile(None)
                    self.peak = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()
                    raise KeyboardInterrupt
            yield ImageGroup(part, list(places), torch.empty(len(places)), {})

    def _count(self, frame, event, argument) -> None:
        self.calls += event in ("call", "c_call")


def costs(folder: Path, names: int) -> tuple[int, int]:
    """Calls and largest memory of ten parts of the extraction of so many images."""
    store = TokenStore.create(folder / str(names), map(str, range(names)), (2, 2), 9, "digest")
    loader = FreeLoader(12)
    with pytest.raises(KeyboardInterrupt):
        extract_tokens(
            lambda inputs: torch.zeros(len(inputs), 4, dtype=torch.int64), loader, store, np.arange(names)
        )
    assert store.missing().size == names - 10 * PART_ROWS
    return loader.calls, loader.peak


def test_a_part_costs_the_same_with_few_names_and_with_imagenets(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "FLUSH_SECONDS", float("inf"))  # a loaded machine takes longer
    few, many = (costs(tmp_path, parts * PART_ROWS) for parts in (100, 1_252))
    assert many[0] < 1.05 * few[0]
    assert many[1] < 1.2 * few[1] + 2**18
