"""A training on stored squares is the training on files: the same pixels, draws, order and losses."""

import errno
import gc
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from config_building import ROOT, load
from imagenet_folder import write_imagenet
from mmengine.registry import DATASETS
from stored_squares import (
    CROP,
    JITTER,
    LOAD,
    PACK,
    SIZE,
    config,
    decoded,
    fill,
    grids_of,
    make_store,
    named,
    stored,
    write_images,
)
from torch.utils.data import DataLoader
from trainings import Noted, StopAfter, build, final, same

import mapet_mm
from mapet_mm.datasets import StoredImages, reading, whole_batch
from mapet_mm.datasets.samplers import SeededDataset, SeededIndex
from mapet_mm.models.data_preprocessors.data_preprocessor import TokenGridDataPreprocessor
from mapet_mm.structures import TokenStore, TokenStoreError, extend_store, parts
from mapet_mm.structures.squares import Squares
from mapet_mm.structures.token_store import PART_ROWS
from mapet_mm.tokenizers.squares import SquareLoader, store_images
from mapet_mm.utils.errors import UserError

TRAIN, VAL = named("train", 10), named("val", 4)
MASK = dict(type="mapet_mm.BlockwiseMask", input_size=4, num_masking_patches=6, min_num_patches=2)


def store_squares(folder: Path) -> None:
    store_images(SquareLoader.from_config(config(decoded(folder))))


@pytest.fixture
def folder(tmp_path) -> Path:
    """10 training and 4 validation images with tokens and squares."""
    make_store(tmp_path, [*TRAIN, *VAL])
    store_squares(tmp_path)
    return tmp_path


def names_in(dataset: StoredImages, folder: Path) -> list[str]:
    paths = [dataset.get_data_info(index)["img_path"] for index in range(len(dataset))]
    return [str(Path(path).relative_to(folder / "data")) for path in paths]


@pytest.mark.parametrize("steps", [(), (JITTER,), (JITTER, MASK)], ids=["plain", "jitter", "mask"])
def test_an_item_is_what_the_whole_pipeline_makes_of_the_file(folder, steps):
    from_files = SeededDataset(DATASETS.build(decoded(folder, steps=steps)))
    from_squares = SeededDataset(DATASETS.build(stored(folder, pipeline=(*steps, PACK))))
    assert len(from_files) == len(from_squares) == len(TRAIN)
    for index in range(len(TRAIN)):
        seeded = SeededIndex(index, 7 * index + 1)
        expected, item = from_files[seeded], from_squares[seeded]
        assert torch.equal(item["inputs"], expected["inputs"])
        before, sample = expected["data_samples"], item["data_samples"]
        assert np.array_equal(sample.token_grid, before.token_grid)
        for key in ("img_path", "sample_idx", "draw_seed", "mask"):
            assert np.array_equal(sample.get(key), before.get(key)), key


RECIPE = ROOT / "configs/mapet/mapet_vit-tiny-p16_kclip_16xb128-amp-coslr-300e_in1k.py"


def test_imagenets_recipe_stores_its_squares_and_gives_the_same_items_from_them(tmp_path):
    write_imagenet(tmp_path)
    cfg = load(RECIPE)
    dataset = cfg.train_dataloader.dataset
    dataset.data_root = str(tmp_path)
    load_image, crop, jitter, load_tokens, pack = dataset.pipeline
    load_tokens.store = str(tmp_path / "tokens")
    store_images(SquareLoader.from_config(cfg))
    options = dict(prefix="train/", square=[load_image, crop], pipeline=[jitter, pack])
    from_squares = SeededDataset(StoredImages(load_tokens.store, **options))
    from_files = SeededDataset(DATASETS.build(dataset))
    assert len(from_squares) == len(from_files) == 1  # the image that the store skipped is in neither
    expected, item = from_files[SeededIndex(0, 5)], from_squares[SeededIndex(0, 5)]
    assert item["inputs"].shape == (3, 224, 224)
    assert torch.equal(item["inputs"], expected["inputs"])
    assert np.array_equal(item["data_samples"].token_grid, expected["data_samples"].token_grid)


def test_steps_from_squares_have_the_losses_of_decoding_bit_for_bit(tmp_path):
    make_store(tmp_path, named("train", 20))
    store_squares(tmp_path)
    losses = {}
    for kind in (decoded, stored):
        losses[kind] = []
        runner = build(tmp_path / kind.__name__, dataset=kind(tmp_path), interval=100)
        runner.register_hook(Noted(losses[kind]))
        runner.train()
    assert len(losses[stored]) == 15
    assert losses[stored] == losses[decoded]


def test_a_checked_training_on_squares_that_stops_and_resumes_ends_as_one_on_files(folder):
    build(folder / "whole", dataset=decoded(folder)).train()
    options = dict(dataset=stored(folder), custom_hooks=[dict(type="mapet_mm.TokenStoreCheckHook")])
    stopped = build(folder / "stopped", **options)
    stopped.register_hook(StopAfter(5))  # in the middle of an epoch
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    build(folder / "stopped", resume=True, workers=1, **options).train()
    assert same(final(folder / "whole"), final(folder / "stopped"))


def test_a_whole_batch_is_its_items_and_fits_the_preprocessor(folder):
    dataset = DATASETS.build(stored(folder, pipeline=()))
    (batch,) = DataLoader(SeededDataset(dataset), len(TRAIN), collate_fn=whole_batch)
    assert batch["inputs"].shape == (len(TRAIN), 3, SIZE, SIZE)
    assert batch["inputs"].is_contiguous(memory_format=torch.channels_last)
    for index, sample in enumerate(batch["data_samples"]):
        item = dataset[index]
        assert np.array_equal(batch["inputs"][index].permute(1, 2, 0), item["img"])
        assert np.array_equal(batch["token_grids"][index], item["token_grid"])
        assert (sample.img_path, sample.sample_idx) == (item["img_path"], item["sample_idx"])
    seeded = SeededDataset(dataset).__getitems__([SeededIndex(3, 5), SeededIndex(1, 6)])
    assert [sample.draw_seed for sample in seeded["data_samples"]] == [5, 6]
    # As a batch of packed items.
    preprocessor = TokenGridDataPreprocessor(mean=[127.5] * 3, std=[64.0] * 3, to_rgb=True)
    packed = DATASETS.build(stored(folder, pipeline=(PACK,))).__getitems__(range(len(TRAIN)))
    items = {key: [item[key] for item in packed] for key in packed[0]}
    for training in (True, False):
        images, grids = preprocessor(dict(batch), training)["inputs"]
        expected_images, expected_grids = preprocessor(dict(items), training)["inputs"]
        assert torch.equal(images, expected_images)
        assert torch.equal(grids, expected_grids)


@pytest.mark.parametrize(("errors", "stops"), [(4, False), (5, True)])
def test_an_error_of_the_storage_costs_no_whole_batch(folder, monkeypatch, errors, stops):
    """After the batch, its first image is read four times."""
    monkeypatch.setattr(reading, "RETRIES", (0.0, 0.0, 0.0))
    dataset = SeededDataset(DATASETS.build(stored(folder, pipeline=())))
    indices = [SeededIndex(3, 5), SeededIndex(1, 6)]
    expected = dataset.__getitems__(indices)
    outcomes = [OSError(errno.EIO, "Input/output error")] * errors + [None] * len(indices)
    read = Squares.read

    def read_or_raise(self, rows):
        if error := outcomes.pop(0):
            raise error
        return read(self, rows)

    monkeypatch.setattr(Squares, "read", read_or_raise)
    if stops:
        with pytest.raises(UserError, match=rf"{TRAIN[3]}` cannot be read .* look at the storage"):
            dataset.__getitems__(indices)
        return
    batch = whole_batch(dataset.__getitems__(indices))
    assert torch.equal(batch["inputs"], expected["inputs"])
    assert [sample.draw_seed for sample in batch["data_samples"]] == [5, 6]


def repeated(folder: Path) -> dict:
    return dict(type="RepeatDataset", times=2, dataset=stored(folder, pipeline=()))


def joined(folder: Path) -> dict:
    """Its last images are decoded from files."""
    kinds = [stored(folder, "train/0/", ()), stored(folder, "train/1/", ()), decoded(folder, "train/2", ())]
    return dict(type="ConcatDataset", datasets=kinds)


@pytest.mark.parametrize("wrapped", [repeated, joined])
def test_a_batch_of_wrapped_sets_is_that_of_the_bare_one(folder, wrapped):
    jitter = {name: value for name, value in JITTER.items() if name != "type"}
    preprocessor = TokenGridDataPreprocessor(mean=[127.5] * 3, std=[64.0] * 3, color_jitter=jitter)
    indices = [SeededIndex(index, 7 * index + 1) for index in range(len(TRAIN))]
    prepared = []
    for options in (stored(folder, pipeline=()), wrapped(folder)):
        dataset = SeededDataset(DATASETS.build(options))
        prepared.append(preprocessor(whole_batch(dataset.__getitems__(indices)), training=True))
    before, now = prepared
    for expected, tensor in zip(before["inputs"], now["inputs"], strict=True):
        assert torch.equal(tensor, expected)
    for key in ("img_path", "draw_seed"):
        expected = [sample.get(key) for sample in before["data_samples"]]
        assert [sample.get(key) for sample in now["data_samples"]] == expected


def test_images_that_the_store_skipped_are_left_out_and_a_prefix_finds_later_images(tmp_path):
    store = make_store(tmp_path, [*TRAIN, *VAL], skipped=(0, 4, 5, 13))
    later = [f"train/9/{number}.png" for number in range(2)]
    write_images(tmp_path / "data", later)
    fill(extend_store(store.path, later))
    store_squares(tmp_path)
    kept = [name for number, name in enumerate(TRAIN) if number not in (0, 4, 5)]
    train = DATASETS.build(stored(tmp_path))
    assert names_in(train, tmp_path) == [*kept, *later]
    assert names_in(DATASETS.build(stored(tmp_path, "val/")), tmp_path) == VAL[:3]
    assert len(DATASETS.build(stored(tmp_path, ""))) == len(kept) + len(later) + 3
    rows = train.rows(range(len(train)))
    assert [train[index]["data_samples"].token_grid.tolist() for index in range(len(train))] == grids_of(
        rows
    ).tolist()
    for index in (-1, len(train)):
        with pytest.raises(IndexError):
            train[index]


def extended(folder: Path) -> dict:
    extend_store(folder / "tokens", ["train/new.png"])
    return stored(folder)


def replaced(folder: Path) -> dict:
    """The tokens were made anew, and the old squares lie beside them."""
    shutil.move(folder / "tokens", folder / "old")
    make_store(folder, [*TRAIN, *VAL])
    shutil.copytree(folder / "old/squares", folder / "tokens/squares")
    return stored(folder)


REFUSED = [
    (lambda path: dict(stored(path), store=str(path / "none")), "none` does not exist"),
    (lambda path: dict(stored(path), size=24), "has no squares of 24 px"),
    (lambda path: stored(path, square=[LOAD]), r"pipeline\.1: removed"),
    (lambda path: stored(path, square=[LOAD, dict(CROP, interpolation="area")]), "bicubic, now area"),
    (lambda path: stored(path, "test/"), "no images whose names begin with `test/`"),
    (lambda path: listed_of_another_folder(path), "no image `of another folder"),
    (extended, "not all images of .* have a square"),
    (replaced, "store: .*, now "),
]


def test_images_of_a_list_are_left_out(folder):
    (folder / "held_out.txt").write_text("\n".join([TRAIN[3], VAL[0]]))
    dataset = DATASETS.build(stored(folder, "", left_out=str(folder / "held_out.txt")))
    assert names_in(dataset, folder) == sorted({*TRAIN, *VAL} - {TRAIN[3], VAL[0]})


def test_a_name_in_a_list_may_hold_what_splitlines_takes_for_a_line_break(tmp_path):
    names = [f"train/0/a{character}b.png" for character in "\x0b\x0c\x1c\x85\u2028\u2029"]
    make_store(tmp_path, [*names, *TRAIN])
    store_squares(tmp_path)
    (tmp_path / "list.txt").write_bytes("\r\n".join([*names, ""]).encode())  # as Windows writes it
    dataset = DATASETS.build(stored(tmp_path, left_out=str(tmp_path / "list.txt")))
    assert names_in(dataset, tmp_path) == TRAIN


def listed_of_another_folder(folder: Path) -> dict:
    (folder / "list.txt").write_text("of another folder.png")
    return stored(folder, left_out=str(folder / "list.txt"))


@pytest.mark.parametrize(("change", "noun"), REFUSED, ids=[noun[:25] for _, noun in REFUSED])
def test_squares_that_are_not_those_of_the_config_are_refused(folder, change, noun):
    with pytest.raises(TokenStoreError, match=noun) as error:
        DATASETS.build(change(folder))
    assert "\n" not in str(error.value)


def test_a_store_that_was_repaired_since_is_refused_before_a_training(tmp_path):
    store = make_store(tmp_path, TRAIN, skipped=(3,))
    store_squares(tmp_path)
    store.write([3], np.zeros((1, 4, 4), int))
    runner = build(
        tmp_path / "run",
        dataset=stored(tmp_path),
        custom_hooks=[dict(type="mapet_mm.TokenStoreCheckHook", alignment=False)],
    )
    with pytest.raises(UserError, match="not of the images that have tokens now"):
        runner.train()


@pytest.mark.parametrize("remake", [lambda path: None, lambda path: make_store(path, [*TRAIN, *VAL])])
def test_a_store_that_is_replaced_in_mid_training_stops_it_or_gives_what_is_open(folder, remake):
    dataset = DATASETS.build(stored(folder, pipeline=(PACK,)))
    before = dataset[0]["inputs"]
    shutil.rmtree(folder / "tokens")
    remake(folder)
    assert torch.equal(dataset[0]["inputs"], before)
    with pytest.raises(TokenStoreError, match="replaced while it was in use"):
        pickle.loads(pickle.dumps(dataset))[0]


def test_workers_read_a_dataset_that_was_used_before_the_fork_or_pickled(folder):
    """A worker that is started anew gets the dataset pickled."""
    dataset = mapet_mm.StoredImages(str(folder / "tokens"), size=SIZE)
    expected = [dataset[index]["img"].tobytes() for index in range(len(dataset))]
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 4000
    for given in (dataset, pickle.loads(pickled)):
        loader = DataLoader(
            given, None, num_workers=2, collate_fn=whole_batch, multiprocessing_context="fork"
        )
        assert [item["img"].numpy().tobytes() for item in map(as_tensors, loader)] == expected


def as_tensors(item: dict) -> dict:
    return item | {"img": torch.as_tensor(item["img"])}


def test_a_row_that_another_process_writes_is_found_without_opening_anew(tmp_path):
    store = TokenStore.create(tmp_path / "a", ["a", "b"], (1, 1), 8, "digest")
    store.write([0], [[[5]]])
    reader = TokenStore.open(tmp_path / "a")
    assert reader["a"] == 5
    TokenStore.open(tmp_path / "a").write([1], [[[6]]])
    assert reader["b"] == 6
    assert reader.grids([1, 0]).ravel().tolist() == [6, 5]


def test_more_parts_than_files_may_be_open_are_read_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "most_parts", lambda: 2)
    count = 4 * PART_ROWS
    store = TokenStore.create(tmp_path / "a", [f"{row:05d}" for row in range(count)], (1, 1), count, "digest")
    store.write(range(count), np.arange(count).reshape(-1, 1, 1))
    files = len(list(Path("/proc/self/fd").iterdir()))
    rows = np.random.default_rng(0).integers(count, size=200)
    assert store.grids(rows).ravel().tolist() == rows.tolist()
    assert len(list(Path("/proc/self/fd").iterdir())) <= files + 2
    del store
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= files


def test_a_process_may_open_a_third_of_the_files_that_the_system_lets_it(monkeypatch):
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(parts.resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(parts.resource, "setrlimit", lambda _, new: limits.update(now=new))
    assert parts.most_parts.__wrapped__() == 1365  # ImageNet's 1,252 parts, also where 4,096 is the most
    assert limits["now"] == (4096, 4096)
    limits["now"] = (1024, 1024)
    assert parts.most_parts.__wrapped__() == 341
