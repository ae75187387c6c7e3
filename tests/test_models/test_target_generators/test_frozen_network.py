"""A frozen network has all of its weights: a checkpoint's, its constructor's, or those of a seed."""

import filelock
import pytest
import torch

from mapet_mm import weight_files
from mapet_mm.models.target_generators import kclip
from mapet_mm.models.target_generators.frozen_network import build_frozen, weights_digest
from mapet_mm.registry import MODELS
from mapet_mm.tokenizers import TokenizerError
from mapet_mm.weight_files import fetch

ARCH = dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=48)
VIT = dict(type="VisionTransformer", arch=ARCH, img_size=24, patch_size=4)
TIMM = dict(type="TIMMBackbone", model_name="vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1)


@pytest.fixture
def checkpoint(tmp_path) -> dict:
    """A checkpoint of a model whose `backbone` is VIT, as an entry `init_cfg`."""
    weights = MODELS.build(VIT).state_dict()
    path = tmp_path / "vit.pth"
    torch.save({"state_dict": {f"backbone.{name}": value for name, value in weights.items()}}, path)
    return dict(type="Pretrained", checkpoint=str(path), prefix="backbone.")


@pytest.mark.parametrize("prefix", ["backbone.", "backbone"])
def test_all_weights_of_a_checkpoint_are_loaded_even_beside_a_seed(checkpoint, prefix):
    network, words = build_frozen(dict(VIT, init_cfg=[dict(checkpoint, prefix=prefix)]), 5)
    expected = torch.load(checkpoint["checkpoint"])["state_dict"]
    assert words == "vit.pth"
    assert all(torch.equal(value, expected[f"backbone.{k}"]) for k, value in network.state_dict().items())


def test_random_weights_follow_the_seed_and_leave_the_callers_generator_alone():
    state = torch.get_rng_state()
    one, again, other = (build_frozen(VIT, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert weights_digest(one[0]) == weights_digest(again[0]) != weights_digest(other[0])
    assert one[1] == "random, seed 3"


def test_weights_that_a_constructor_loads_need_no_seed(tmp_path):
    theirs = MODELS.build(TIMM).timm_model
    torch.save(theirs.state_dict(), tmp_path / "timm.pth")
    config = dict(TIMM, checkpoint_path=str(tmp_path / "timm.pth"), num_classes=0)
    network, words = build_frozen(config, None)
    assert weights_digest(network.timm_model) == weights_digest(theirs)
    assert words == "TIMMBackbone's own"


def test_a_network_without_parameters_needs_no_weights():
    build_frozen(dict(type="torch.nn.PixelUnshuffle", downscale_factor=4), None)


PRETRAINED = dict(type="Pretrained", checkpoint="a.pth")
NESTED = dict(type="ImageClassifier", backbone=dict(VIT, init_cfg=PRETRAINED))
REFUSED = [
    (VIT, None, "VisionTransformer has no weights"),
    (TIMM, None, "no weights"),
    (NESTED, None, "`backbone` in ImageClassifier names weights"),
    (NESTED, 0, "nothing loads"),
]


@pytest.mark.parametrize(("config", "seed", "noun"), REFUSED)
def test_networks_without_weights_are_refused(config, seed, noun):
    with pytest.raises(TokenizerError, match=noun) as error:
        build_frozen(config, seed)
    assert "\n" not in str(error.value)


NAN = torch.full((24,), torch.nan)
UNFIT = [
    ("ln1.weight", None, "lacks 1 of .* tensors, `ln1.weight` first"),
    ("ln1.weight", NAN, "NaN or infinity, in `ln1.weight`"),
    ("ln1.bias", torch.full((24,), torch.inf), "NaN or infinity, in `ln1.bias`"),
]


@pytest.mark.parametrize(("name", "value", "noun"), UNFIT)
def test_checkpoints_that_do_not_fit_are_refused(checkpoint, name, value, noun):
    """MMEngine's own loading would leave missing weights random."""
    weights = torch.load(checkpoint["checkpoint"])["state_dict"]
    weights[f"backbone.{name}"] = value
    weights = {name: value for name, value in weights.items() if value is not None}
    torch.save({"state_dict": weights}, checkpoint["checkpoint"])
    with pytest.raises(TokenizerError, match=noun):
        build_frozen(dict(VIT, init_cfg=checkpoint), None)


@pytest.mark.parametrize("which", ["CLIP", "others"])
def test_of_processes_that_start_at_once_one_fetches_the_weights(which, tmp_path, monkeypatch):
    """The others wait at a lock."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    fetched = []

    def download(*_: object, **__: object) -> str:
        (lock,) = tmp_path.rglob("*.lock")
        with pytest.raises(filelock.Timeout), filelock.FileLock(lock, is_singleton=False, timeout=0):
            pass
        fetched.append(lock.name)
        return "RN50.pt"

    monkeypatch.setattr("open_clip.pretrained.download_pretrained", download)
    monkeypatch.setattr(weight_files, "download", download)
    if which == "CLIP":
        assert kclip.weights_file("RN50", "openai") == "RN50.pt"
    else:
        fetch("https://somewhere/weights.pth?version=1")
    assert len(fetched) == 1
