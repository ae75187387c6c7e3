"""Tokenizers stay what they are inside a model; true float32 leaves the caller's switches as they were."""

import numpy as np
import pytest
import torch

from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import KCLIP, Codebook, full_float32

PIXELS = dict(type="torch.nn.PixelUnshuffle", downscale_factor=4)
SMALL = dict(layers=[1, 1, 1, 1], width=8, image_size=64)


@pytest.fixture
def kclip() -> KCLIP:
    random = dict(type="random", seed=0)
    features = KCLIP(SMALL, random).features(torch.randn(5, 3, 64, 64)).flatten(0, 1)
    return KCLIP(SMALL, random, Codebook(features))


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double"])
def test_a_model_of_another_precision_gets_the_same_tokens(kclip, convert):
    images = torch.randn(4, 3, 64, 64)
    tokens = kclip(images)
    assert len(tokens.unique()) > 1
    holder = getattr(torch.nn.ModuleDict({"target_generator": kclip}), convert)()
    assert torch.equal(holder["target_generator"](images), tokens)


BACKENDS = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul)


def switches() -> list[str]:
    return [torch.backends.fp32_precision, *(backend.fp32_precision for backend in BACKENDS)]


@pytest.mark.parametrize("setting", ["untouched", "old", "matmul", "new"])
def test_full_float32_works_beside_either_interface_and_puts_all_switches_back(kclip, setting):
    """PyTorch refuses to read its old switches once one of the new is set."""
    before = switches()
    try:
        if setting == "old":
            torch.backends.cuda.matmul.allow_tf32 = True
        elif setting == "matmul":
            torch.set_float32_matmul_precision("high")
        elif setting == "new":
            torch.backends.fp32_precision = "tf32"
        set_by_caller = switches()
        with full_float32(torch.device("cpu")):
            assert switches()[1:] == ["ieee"] * 3
        assert switches() == set_by_caller
        kclip(torch.randn(1, 3, 64, 64))
    finally:
        torch.backends.fp32_precision = before[0]
        for backend, value in zip(BACKENDS, before[1:], strict=True):
            backend.fp32_precision = value


def test_full_float32_switches_autocast_off_and_survives_an_error():
    before = switches()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with full_float32(torch.device("cpu")):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        with pytest.raises(RuntimeError), full_float32(torch.device("cpu")):
            torch.ones(2, 2) @ torch.ones(3, 2)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    assert switches() == before


@pytest.mark.parametrize(
    "config",
    [
        dict(type="mapet_mm.FrozenTokenizer", tokenizer=PIXELS, vocab_size=3, random_seed=0),
        dict(type="mapet_mm.GridKMeans", encoder=PIXELS),
        dict(type="mapet_mm.KCLIP", clip_model=SMALL, pretrained=dict(type="random", seed=0)),
    ],
    ids=lambda config: config["type"],
)
def test_oblong_images_are_refused_with_another_way(config):
    message = r"^image_size=\(32, 64\): a tokenizer takes square images; .*\"Tokens from elsewhere\"\)$"
    with pytest.raises(ValueError, match=message):
        MODELS.build(dict(config, image_size=(32, 64)))


@pytest.mark.parametrize("size", [64, (64, 64), np.int64(64)])
def test_a_square_comes_in_any_form(size):
    assert KCLIP(SMALL, dict(type="random", seed=0), image_size=size).metadata["image_size"] == 64
