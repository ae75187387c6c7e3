"""The authors' weights by name: fetched once, converted, loaded wherever a checkpoint is taken."""

import urllib.error
import urllib.request
from pathlib import Path

import mmpretrain
import pytest
import torch
from config_building import RECIPES, ROOT, index_models, read
from mmengine.runner import load_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader

import mapet_mm.hub  # noqa: F401
from mapet_mm.convert import mm_to_reference
from mapet_mm.interop import released
from mapet_mm.interop.released import FILES, ReleasedWeightsError, released_weights
from mapet_mm.models import MaPeTViT
from mapet_mm.weight_files import WeightFileError

METHODS = ("mapet", "pim", "mim", "visible_mim", "beit", "cae")
SMALL = dict(embed_dims=24, num_layers=1, num_heads=3, feedforward_channels=96)


@pytest.fixture
def vit() -> MaPeTViT:
    torch.manual_seed(0)
    vit = MaPeTViT(SMALL, img_size=32, out_type="avg_featmap", final_norm=False)
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter)
    return vit


@pytest.fixture
def fetched(monkeypatch, tmp_path, vit) -> list[str]:
    """Addresses that were fetched, from a publisher who has a small network's weights as the authors' are."""
    weights = {f"backbone.{name}": value for name, value in vit.state_dict().items()}
    weights |= {"head.fc.weight": torch.randn(5, 24), "head.fc.bias": torch.randn(5)}
    addresses: list[str] = []

    def fetch(address: str, target: Path) -> None:
        addresses.append(address)
        torch.save({"state_dict": mm_to_reference(weights), "arch": "vit_standard"}, target)

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(released, "download", fetch)
    return addresses


def test_weights_are_fetched_once_and_load_by_name(fetched, vit):
    other = MaPeTViT(SMALL, img_size=32, out_type="avg_featmap", final_norm=False)
    other.init_cfg = dict(type="Pretrained", checkpoint="mapet://vit-small-vqkd", prefix="backbone.")
    other.init_weights()
    for name, value in vit.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    weights = CheckpointLoader.load_checkpoint("mapet://vit-small-vqkd", map_location="cpu")["state_dict"]
    assert weights["head.fc.weight"].shape == (5, 24)
    released_weights("vit-small-vqkd").unlink()  # the authors' file, which may have been put there, is taken
    assert released_weights("mapet://vit-small-vqkd").is_file()
    assert fetched == [released.ADDRESS + "vit_standard_small_patch16_224_VQKD.tar"]


def test_a_whole_model_of_the_hub_comes_with_them(fetched):
    model = mmpretrain.get_model(
        "mapet_vit-base-p16_kclip-released_in1k",
        pretrained=True,
        backbone=dict(arch=dict(_delete_=True, **SMALL), img_size=32),
        head=dict(in_channels=24, num_classes=5),
    )
    expected = torch.load(released_weights("vit-base-kclip"))["state_dict"]
    assert set(expected) == set(model.state_dict())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())


def test_the_index_lists_every_recipe_of_mmpretrain_and_those_that_classify():
    listed = {entry["Config"]: entry["Name"] for entry in index_models() if "Weights" not in entry}
    recipes = [path.relative_to(ROOT) for path in RECIPES if read(path).default_scope == "mmpretrain"]
    recipes = [path for path in recipes if path.parts[1] in METHODS]
    assert sorted(listed) == sorted(map(str, recipes))
    for path in recipes:
        prefix = "mapet_" if "benchmarks" in path.parts else ""
        assert listed[str(path)] == prefix + path.stem
    for entry in index_models():  # `mmpretrain.inference_model` needs the task of a classifier
        tasks = [result["Task"] for result in entry.get("Results", [])]
        assert tasks == ["Image Classification"] * ("benchmarks" in entry["Config"]), entry["Name"]


def test_the_index_names_weights_that_there_are():
    weights = {entry["Weights"]: entry for entry in index_models() if "Weights" in entry}
    assert sorted(weights) == sorted(f"mapet://{name}" for name in FILES)
    for name, entry in weights.items():
        assert f"vit-{name.split('-')[1]}-p16" in entry["Config"]
        assert entry["Converted From"]["Weights"] == released.ADDRESS + FILES[name.removeprefix("mapet://")]


def test_without_a_network_one_line_names_the_place_for_the_file(fetched, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.undo()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", fail)
    with pytest.raises(WeightFileError) as error:
        released_weights("vit-base-vqkd")
    assert str(error.value).endswith(f"file at {tmp_path / 'mapet' / FILES['vit-base-vqkd']}")
    assert "\n" not in str(error.value)


def test_another_file_at_the_address_and_other_names_are_refused(fetched, tmp_path):
    original = tmp_path / "mapet" / FILES["vit-tiny-kclip"]
    original.parent.mkdir()
    original.write_text("<html>please log in</html>")
    with pytest.raises(ReleasedWeightsError, match=r"KCLIP\.tar.* remove it to fetch it again"):
        released_weights("vit-tiny-kclip")
    with pytest.raises(ReleasedWeightsError, match="there are vit-tiny"):
        load_checkpoint(torch.nn.Linear(1, 1), "mapet://vit-large-kclip")
