"""CamVid becomes squares at half size, in lists by recording."""

import numpy as np
from converters.camvid import RECORDINGS, find_pairs, write_squares
from PIL import Image


def test_squares_have_halved_pixels_void_is_ignored_and_each_recording_has_its_list(tmp_path):
    source = tmp_path / "CamVid"
    for folder in ("train", "trainannot"):
        (source / folder).mkdir(parents=True)
    for number, recording in enumerate(RECORDINGS):
        pixels = np.full((64, 140, 3), 10 * number, np.uint8)
        labels = np.full((64, 140), 3, np.uint8)
        labels[:, :64] = 11
        Image.fromarray(pixels).save(source / f"train/{recording}_1.png")
        Image.fromarray(labels).save(source / f"trainannot/{recording}_1.png")
    out = tmp_path / "camvid_32"
    assert write_squares(out, find_pairs(source), side=32)

    # 70 x 32 halved: two squares, the first of which is void.
    names = sorted(path.stem for path in (out / "images").iterdir())
    assert names == [f"{recording}_1_0_{left}" for recording in RECORDINGS for left in (0, 32)]
    assert (np.asarray(Image.open(out / "images/0016E5_1_0_32.png")) == 20).all()
    assert (np.asarray(Image.open(out / "annotations/0016E5_1_0_0.png")) == 255).all()
    assert (np.asarray(Image.open(out / "annotations/0016E5_1_0_32.png")) == 3).all()
    own = (out / "meta/0006R0.txt").read_text().split()
    others = (out / "meta/without_0006R0.txt").read_text().split()
    assert sorted(own + others) == names
    assert all(name.startswith("0006R0") for name in own)
