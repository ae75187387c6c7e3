"""Photographs as other sensors would have taken them."""

import numpy as np
from lab.sensors import FirstBands, Sensor

RED = np.array([[[0, 0, 255]]], np.uint8)  # blue, green, red, as images are loaded


def seen(kind: str, image: np.ndarray) -> np.ndarray:
    return Sensor(kind).transform({"img": image})["img"]


def test_one_band_is_the_brightness_three_times():
    np.testing.assert_array_equal(seen("band", RED), [[[76, 76, 76]]])


def test_the_inverted_band_has_sixteen_levels_from_white_to_black():
    ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    band = seen("inverted", ramp)[0, :, 0]
    assert band[0] == 255
    assert band[255] == 0
    np.testing.assert_array_equal(np.unique(band), np.arange(0, 256, 17))
    assert (np.diff(band.astype(int)) <= 0).all()


def test_five_bands_mix_red_green_and_blue_and_the_tokenizer_gets_the_first_three():
    bands = seen("five", RED)
    np.testing.assert_array_equal(bands, [[[153, 0, 102, 255, 0]]])
    # Red, green and blue for the tokenizer are the first three; images lie in reverse.
    np.testing.assert_array_equal(FirstBands().transform({"img": bands})["img"], [[[102, 0, 153]]])
