"""The authors' weights by name: fetched once, checked, converted, loaded wherever a checkpoint is taken."""

import contextlib
import hashlib
import re
import urllib.error

import mmpretrain
import pytest
import torch
from config_building import index_models
from mmengine.runner import load_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader

import mapet_mm.hub  # noqa: F401
from mapet_mm.engine.runners.resume import require_checkpoint
from mapet_mm.interop import released
from mapet_mm.interop.convert import mm_to_reference
from mapet_mm.interop.released import FILES, ReleasedWeightsError, released_weights
from mapet_mm.models import MaPeTViT

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

    def fetch(address: str, target: str, progress: bool = True) -> None:
        addresses.append(address)
        torch.save({"state_dict": mm_to_reference(weights), "arch": "vit_standard"}, target)

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    return addresses


def test_weights_are_fetched_once_and_load_by_name(fetched, vit):
    other = MaPeTViT(SMALL, img_size=32, out_type="avg_featmap", final_norm=False)
    other.init_cfg = dict(type="Pretrained", checkpoint="mapet://vit-small-vqkd", prefix="backbone.")
    other.init_weights()
    for name, value in vit.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    weights = CheckpointLoader.load_checkpoint("mapet://vit-small-vqkd", map_location="cpu")["state_dict"]
    assert weights["head.fc.weight"].shape == (5, 24)
    assert fetched == [released.ADDRESS + "vit_standard_small_patch16_224_VQKD.tar"]


def test_who_waited_for_another_process_takes_what_it_has_converted(fetched, monkeypatch):
    whole = released_weights("vit-small-vqkd")
    content = whole.read_bytes()
    for file in whole.parent.iterdir():
        file.unlink()
    fetched.clear()

    @contextlib.contextmanager
    def held_by_another(path):
        whole.write_bytes(content)
        yield

    monkeypatch.setattr(released, "FileLock", held_by_another)
    weights = CheckpointLoader.load_checkpoint("mapet://vit-small-vqkd")["state_dict"]
    assert weights["head.fc.weight"].shape == (5, 24)
    assert not fetched


def test_a_whole_model_of_the_hub_comes_with_them(fetched):
    model = mmpretrain.get_model(
        "mapet_vit-base-p16_kclip-released_in1k",
        pretrained=True,
        backbone=dict(arch=dict(_delete_=True, **SMALL), img_size=32),
        head=dict(in_channels=24, num_classes=5),
    )
    expected = torch.load(released_weights("vit-base-kclip"))["state_dict"]
    assert {name: value.shape for name, value in expected.items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())


def test_the_index_names_weights_that_there_are():
    weights = {entry["Weights"]: entry for entry in index_models() if "Weights" in entry}
    assert sorted(weights) == sorted(f"mapet://{name}" for name in FILES)
    for name, entry in weights.items():
        size = name.split("-")[1]
        assert f"vit-{size}-p16" in entry["Config"]
        assert entry["Converted From"]["Weights"] == released.ADDRESS + FILES[name.removeprefix("mapet://")]


def test_a_digest_is_recorded_at_first_and_then_it_counts(fetched, tmp_path):
    converted = released_weights("vit-tiny-kclip")
    original = tmp_path / "mapet" / FILES["vit-tiny-kclip"]
    digest = hashlib.sha256(original.read_bytes()).hexdigest()
    assert original.with_suffix(".sha256").read_text() == f"{digest}  {original.name}\n"
    converted.unlink()
    original.write_bytes(original.read_bytes() + b"?")
    with pytest.raises(ReleasedWeightsError, match=f"not {digest[:12]}… as recorded: remove it to fetch it"):
        released_weights("vit-tiny-kclip")
    assert not converted.exists()


def test_a_digest_that_is_known_here_counts_at_first(fetched, monkeypatch):
    monkeypatch.setitem(released.DIGESTS, "vit-tiny-kclip", "0" * 64)
    with pytest.raises(ReleasedWeightsError, match="not 000000000000… as recorded"):
        released_weights("vit-tiny-kclip")


def test_without_a_network_one_line_says_where_to_put_the_file(fetched, monkeypatch, tmp_path):
    def fail(*_, **__):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    place = tmp_path / "mapet" / FILES["vit-base-vqkd"]
    with pytest.raises(ReleasedWeightsError, match=re.escape(f"or put the file at {place}")) as raised:
        require_checkpoint("checkpoint", "mapet://vit-base-vqkd")
    assert "\n" not in str(raised.value)
    assert sorted(path.name for path in place.parent.iterdir()) == ["vit-base-vqkd.lock"]


def test_a_file_that_was_put_there_is_taken(fetched, monkeypatch, tmp_path):
    released_weights("vit-tiny-vqkd").unlink()
    fetched.clear()
    assert released_weights("mapet://vit-tiny-vqkd").is_file()
    assert not fetched


def test_names_that_are_not_released_are_refused():
    with pytest.raises(
        ReleasedWeightsError, match="no weights `mapet://vit-large-kclip`: there are vit-tiny"
    ):
        load_checkpoint(torch.nn.Linear(1, 1), "mapet://vit-large-kclip")


def test_something_else_at_the_address_is_refused_and_not_kept(fetched, monkeypatch, tmp_path):
    def fetch(_: str, target: str, progress: bool) -> None:
        with open(target, "w") as file:
            file.write("<html>please log in</html>")

    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    with pytest.raises(ReleasedWeightsError, match=r"could not fetch https.*KCLIP\.tar .*it is a web page"):
        released_weights("vit-tiny-kclip")
    assert [path.name for path in (tmp_path / "mapet").iterdir()] == ["vit-tiny-kclip.lock"]
