"""Codebook sheets show exactly the patches that share a token, framed where they are."""

import numpy as np
import pytest
from PIL import Image

from mapet_mm.tokenizers import TokenStore
from mapet_mm.visualization.codebook_sheet import (
    Patch,
    SheetRow,
    choose_members,
    crop_around,
    draw_codebook_sheet,
    find_members,
)

NAMES = ["train/0/a.png", "train/1/b.png", "val/0/c.png"]


@pytest.fixture
def store(tmp_path):
    """Two written images of 2 x 3 tokens and one that is not written yet."""
    made = TokenStore.create(tmp_path / "tokens", NAMES, (2, 3), 10, tokenizer="made")
    made.write([0, 1], np.array([[[7, 2, 7], [0, 7, 2]], [[2, 2, 9], [7, 9, 9]]]))
    return made


def test_members_are_exactly_the_patches_with_the_token(store):
    a, b = NAMES[:2]
    assert find_members(store, [7, 9, 5]) == {
        7: [Patch(a, 0, 0), Patch(a, 0, 2), Patch(a, 1, 1), Patch(b, 1, 0)],
        9: [Patch(b, 0, 2), Patch(b, 1, 1), Patch(b, 1, 2)],
        5: [],
    }


def test_limited_members_are_a_sample_that_follows_the_seed(store):
    every = find_members(store, [7, 9])
    draws = [find_members(store, [7, 9], limit=3, seed=seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    for draw in draws:
        assert len(set(draw[7])) == 3
        assert set(draw[7]) < set(every[7])
        assert draw[9] == every[9]


def test_chosen_members_come_from_as_many_images_as_possible():
    patches = [Patch("a", 0, col) for col in range(5)] + [Patch("b", 0, 0), Patch("c", 0, 0)]
    for seed in range(5):
        chosen = choose_members(patches, 4, seed)
        assert {patch.name for patch in chosen[:3]} == {"a", "b", "c"}
        assert len(set(chosen)) == 4
        assert choose_members(patches, 4, seed) == chosen
    assert len(choose_members(patches, 20, 0)) == 7


@pytest.mark.parametrize(("size", "left", "top"), [((40, 60), 10, 0), ((60, 40), 0, 10)])
def test_crop_shows_the_patch_inside_its_frame(size, left, top):
    """A 4 x 4 grid on the centred square of the image, in patches of 10 px."""
    pixels = np.zeros((*size, 3), np.uint8)
    pixels[top + 20 : top + 30, left + 30 : left + 40] = (250, 10, 20)  # patch (2, 3)
    crop, (x, y, width, height) = crop_around(pixels, Patch("a", 2, 3), (4, 4), context=1)
    assert crop.shape == (30, 30, 3)
    assert (x, y, width, height) == (20, 10, 10, 10)
    framed = crop[int(y) : int(y + height), int(x) : int(x + width)]
    assert (framed == (250, 10, 20)).all()
    assert crop.sum() == framed.sum()


def test_sheet_has_a_row_per_token_and_a_frame_per_patch(store, tmp_path):
    for name in NAMES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 8), "teal").save(tmp_path / name)
    members = find_members(store, [9, 0])
    rows = [SheetRow("token 9", members[9]), SheetRow("token 0", members[0])]
    figure = draw_codebook_sheet(rows, tmp_path, store.grid, context=1)
    assert [len(axes.patches) for axes in figure.axes] == [1, 1, 1, 1, 0, 0]
    assert [figure.axes[place].get_title(loc="left") for place in (0, 3)] == ["token 9", "token 0"]
    assert figure.axes[0].images[0].get_array()[0, 0].tolist() == [0, 128, 128]
