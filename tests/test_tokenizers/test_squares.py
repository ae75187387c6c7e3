"""From images to squares: interrupted, shared, killed, extended, verified and refused."""

import os
import random
import signal
import threading
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from config_building import run_tool
from forked_processes import run_together
from mmengine.registry import DATASETS
from PIL import Image
from stored_squares import (
    CROP,
    JITTER,
    LOAD,
    SIZE,
    config,
    decoded,
    fill,
    make_store,
    named,
    stored,
    write_images,
)
from tqdm import tqdm

import mapet_mm
from mapet_mm.structures import TokenStore, extend_store
from mapet_mm.structures.squares import Squares, images_store
from mapet_mm.structures.token_store import PART_ROWS
from mapet_mm.tokenizers.squares import SquareLoader, store_images, verify_images
from mapet_mm.utils.errors import UserError

NAMES = named("train", PART_ROWS + 6)
# What is decoded once to find the size, besides the squares.
FIRST = 1


@pytest.fixture
def folder(tmp_path) -> Path:
    """1,030 images with tokens, in two parts."""
    make_store(tmp_path, NAMES)
    return tmp_path


def loader_of(folder: Path, dataset: dict | None = None) -> SquareLoader:
    return SquareLoader.from_config(config(dataset or decoded(folder)))


def parts_of(folder: Path) -> list[bytes]:
    """Whole ones: a process killed while it writes leaves a file of another name."""
    return [file.read_bytes() for file in sorted((folder / "tokens/squares/16/parts").glob("*.safetensors"))]


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """Rows of the images that are decoded."""
    seen, square = [], SquareLoader.square
    monkeypatch.setattr(SquareLoader, "square", lambda self, row: seen.append(row) or square(self, row))
    return seen


def test_every_image_gets_the_square_of_its_pipeline_and_a_second_run_decodes_nothing(folder, read):
    squares, num_decoded = store_images(loader_of(folder))
    assert num_decoded == len(NAMES)
    assert squares.has_square().all()
    for row in (0, 500, len(NAMES) - 1):
        image = Image.open(folder / "data" / NAMES[row])
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        resample = Image.Resampling.BICUBIC
        square = image.crop((left, top, left + side, top + side)).resize((SIZE, SIZE), resample)
        assert np.array_equal(squares.read([row])[0], np.asarray(square)[..., ::-1])  # BGR
    before = parts_of(folder)
    read.clear()
    # The recipe that trains on the squares says in `square` how they are made.
    assert store_images(loader_of(folder, stored(folder, square=[LOAD, CROP])))[1] == 0
    assert len(read) == FIRST
    assert parts_of(folder) == before
    assert (folder / "tokens/squares/16/parts").stat().st_mode == (folder / "tokens/parts").stat().st_mode


def test_an_interrupted_run_decodes_only_what_is_left_and_nobody_reads_before_its_end(folder, read):
    update = Squares.update

    def then_stop(self, *changes):
        update(self, *changes)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Squares, "update", then_stop)
        with pytest.raises(KeyboardInterrupt):
            store_images(loader_of(folder))
    squares = Squares(TokenStore.open(folder / "tokens"), SIZE)
    with pytest.raises(UserError, match=r"not all images of .* have a square"):
        squares.has_square()
    left = next(part for part in range(2) if squares.missing_in(part).any())
    read.clear()
    store_images(loader_of(folder))
    assert sorted(read[FIRST:]) == list(squares.part_range(left))


@pytest.mark.slow
def test_eight_kills_at_random_moments_change_no_square(folder):
    began = time.monotonic()
    store_images(loader_of(folder))
    seconds = time.monotonic() - began
    whole = parts_of(folder)
    draws = random.Random(0)
    for _ in range(8):
        for file in (folder / "tokens/squares/16/parts").iterdir():
            file.unlink()
        if not (child := os.fork()):
            tqdm.set_lock(threading.RLock())  # tqdm's own is shared by forks, and a kill would keep it
            store_images(loader_of(folder))
            os._exit(0)
        time.sleep(draws.uniform(0.0, 1.2) * seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert set(parts_of(folder)) <= set(whole)
    store_images(loader_of(folder))
    verify_images(loader_of(folder), 20)
    assert parts_of(folder) == whole


def test_two_processes_store_what_one_does_and_the_cost_comes_first(folder, monkeypatch, capsys):
    path = str(folder / "config.py")
    config(decoded(folder)).dump(path)
    said = run_together(2, "store_images.py", path, folder=folder)
    assert said.startswith("1,030 squares of 16 x 16 px: 0.000791 GB to write into ")
    assert said.count("1,030 squares of 16 x 16 px\n") == 1
    shared = parts_of(folder)
    for file in (folder / "tokens/squares/16/parts").iterdir():
        file.unlink()
    run_tool(monkeypatch, "store_images.py", path)
    assert "wrote " in capsys.readouterr().out
    assert parts_of(folder) == shared
    run_tool(monkeypatch, "store_images.py", path, "--verify", "5")
    assert "all files are whole, 5 squares are those of their images" in capsys.readouterr().out


def test_new_images_and_repaired_ones_cost_only_themselves(tmp_path, read):
    store = make_store(tmp_path, NAMES, skipped=(3,))
    squares, _ = store_images(loader_of(tmp_path))
    assert np.flatnonzero(~squares.has_square()).tolist() == [3]
    first, last = parts_of(tmp_path)
    new = named("val", 4)
    write_images(tmp_path / "data", new)
    fill(extend_store(store.path, new))
    read.clear()
    squares, _ = store_images(loader_of(tmp_path))
    assert sorted(read[FIRST:]) == list(range(len(NAMES), len(NAMES) + 4))
    assert squares.has_square().sum() == len(NAMES) + 3
    assert parts_of(tmp_path)[0] == first
    assert parts_of(tmp_path)[1] != last
    TokenStore.open(store.path).write([3], np.zeros((1, 4, 4), int))  # by --retry-skipped
    read.clear()
    squares, _ = store_images(loader_of(tmp_path))
    assert read[FIRST:] == [3]
    assert squares.has_square().all()


def test_a_row_that_another_image_has_now_gets_that_ones_square(tmp_path, monkeypatch):
    """Of two extensions at the same moment the later one counts. Its tokens were extracted again, as those
    of the other one's image are refused; the squares are still of that image."""
    store = make_store(tmp_path, named("train", 3))
    manifest = store.path / "manifest.json"
    before = manifest.read_text()
    path = str(tmp_path / "config.py")
    config(decoded(tmp_path)).dump(path)
    for name in ("train/9/a.png", "train/9/b.png"):
        manifest.write_text(before)
        write_images(tmp_path / "data", [name])
        extended = extend_store(store.path, [name])
        for part in (store.path / "parts").iterdir():
            part.unlink()
        fill(extended)
        run_tool(monkeypatch, "store_images.py", path)
    last = mapet_mm.StoredImages(str(store.path), size=SIZE)[3]
    assert last["img_path"] == str(tmp_path / "data/train/9/b.png")
    from_file = DATASETS.build(decoded(tmp_path, steps=()))[4]
    assert from_file["data_samples"].img_path == last["img_path"]
    assert np.array_equal(last["img"].transpose(2, 0, 1), from_file["inputs"])


def test_squares_that_changed_and_images_that_changed_are_found(folder):
    store_images(loader_of(folder))
    path, *_ = sorted((folder / "tokens/squares/16/parts").iterdir())
    content = path.read_bytes()
    path.write_bytes(content[:5000] + bytes(50) + content[5050:])
    with pytest.raises(UserError, match="has changed since it was written"):
        verify_images(loader_of(folder), 0)
    path.write_bytes(content[:-50])
    with pytest.raises(UserError, match="another size than its header"):
        store_images(loader_of(folder))
    path.write_bytes(content)
    verify_images(loader_of(folder), len(NAMES))
    Image.new("RGB", (20, 20)).save(folder / "data" / NAMES[7])
    with pytest.raises(UserError, match=rf"{NAMES[7]}` is not what its square"):
        verify_images(loader_of(folder), len(NAMES))
    write_images(folder / "data", [NAMES[7]])
    for name in NAMES[PART_ROWS // 2 :]:  # of a few images, too, some are of the later ones
        Image.new("RGB", (20, 20)).save(folder / "data" / name)
    with pytest.raises(UserError, match="is not what its square"):
        verify_images(loader_of(folder), 20)


def test_an_image_that_cannot_be_decoded_is_named_after_all_others_are_stored(folder):
    broken = folder / "data" / NAMES[-1]
    broken.write_bytes(b"no image")
    with pytest.raises(UserError, match=rf"^1 images with tokens could not be decoded .*{NAMES[-1]}"):
        store_images(loader_of(folder))
    write_images(folder / "data", NAMES[-1:])
    assert store_images(loader_of(folder))[1] == 1


def test_images_without_tokens_are_tried_again_only_if_too_many_are_left_out(tmp_path):
    names = named("train", 6)
    make_store(tmp_path, names)
    images = images_store(tmp_path / "images", names, tmp_path / "data")
    loader = replace(loader_of(tmp_path), store=images, max_skipped=0.5)
    for name in names[3:]:
        (tmp_path / "data" / name).write_bytes(b"no image")
    assert store_images(loader)[1] == 3  # as many as may be left out
    write_images(tmp_path / "data", names)
    loader = replace(loader, store=TokenStore.open(images.path))
    assert store_images(loader)[1] == 0
    assert store_images(replace(loader, max_skipped=0.4))[1] == 3


def few_tokens(folder: Path) -> None:
    extend_store(folder / "tokens", ["train/new.png"])


def other_size(folder: Path) -> None:
    loaded = dict(decoded(folder), pipeline=[LOAD, *decoded(folder)["pipeline"][2:]])
    store_images(loader_of(folder, loaded))


def other_steps(folder: Path, **changes) -> SquareLoader:
    dataset = deepcopy(decoded(folder))
    dataset["pipeline"][1].update(changes)
    return loader_of(folder, dataset)


def with_pipeline(folder: Path, *steps: dict) -> SquareLoader:
    return loader_of(folder, dict(decoded(folder), pipeline=[*steps]))


REFUSED = [
    (lambda path: with_pipeline(path, LOAD, CROP, JITTER), "does not say which images"),
    (lambda path: with_pipeline(path, *decoded(path)["pipeline"][2:]), "does not say which images"),
    (lambda path: loader_of(path, stored(path)), "does not say which images"),
    (lambda path: store_images(other_steps(path, max_attempts=1)), "draw random numbers"),
    (lambda path: store_images(other_steps(path, scale=(16, 12))), "have to make squares"),
    (other_size, "makes uint8 of .* have to make squares|image: resize all images to one size"),
    (lambda path: few_tokens(path) or store_images(loader_of(path)), "no tokens for 1 of 7 images"),
    (
        lambda path: store_images(loader_of(path)) and store_images(other_steps(path, backend="cv2")),
        r"pipeline\.1\.backend: pillow, now cv2",
    ),
]


@pytest.mark.parametrize(("do", "noun"), REFUSED, ids=[noun[:30] for _, noun in REFUSED])
def test_what_would_store_other_squares_is_refused(do, noun, tmp_path):
    make_store(tmp_path, named("train", 6))
    with pytest.raises(UserError, match=noun) as error:
        do(tmp_path)
    assert "\n" not in str(error.value)


def test_a_disk_without_room_is_refused_before_anything_is_decoded(tmp_path, monkeypatch, read, capsys):
    make_store(tmp_path, named("train", 6))
    needed = 6 * SIZE * SIZE * 3
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    with pytest.raises(UserError, match=r"6 squares of 16 x 16 px: .* link to another disk"):
        store_images(loader_of(tmp_path))
    assert len(read) == FIRST
    assert " GB free" in capsys.readouterr().out
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=needed))
    store_images(loader_of(tmp_path))
