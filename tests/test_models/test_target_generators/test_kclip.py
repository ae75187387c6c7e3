"""k-CLIP: the reference's features and tokens, and a tower with the weights that were asked for."""

import urllib.request

import numpy as np
import open_clip
import pytest
import torch
from open_clip.modified_resnet import ModifiedResNet
from safetensors.torch import save_file
from sklearn.datasets import load_sample_image
from torch import nn

from mapet_mm.models.target_generators import kclip
from mapet_mm.models.target_generators.frozen_network import weights_digest
from mapet_mm.models.target_generators.kclip import build_tower, tower_config
from mapet_mm.registry import MODELS
from mapet_mm.structures.codebook import Codebook, CodebookError
from mapet_mm.tokenizers import KCLIP, GridKMeans, TokenizerError, grid_features

SMALL = {"layers": [1, 1, 1, 1], "width": 8, "image_size": 64}
RANDOM = {"type": "random", "seed": 0}
REFERENCE = {**SMALL, "image_size": 128}


@pytest.fixture(scope="module")
def reference(data_dir) -> dict[str, torch.Tensor]:
    with np.load(data_dir / "kclip_reference.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


@pytest.fixture(scope="module")
def weights(reference) -> dict[str, torch.Tensor]:
    return {name.removeprefix("w/"): value for name, value in reference.items() if name.startswith("w/")}


@pytest.fixture
def codebook() -> Codebook:
    return Codebook(np.random.default_rng(0).random((9, 256)).astype(np.float32))


def close(features: torch.Tensor, expected: torch.Tensor, share: float = 1e-5) -> bool:
    return bool((features - expected).abs().max() <= share * expected.abs().max())


def test_features_and_tokens_are_the_references(reference, weights, tmp_path):
    *layers, width, image_size, _ = reference["meta"].tolist()
    torch.save(weights, tmp_path / "tower.pt")
    Codebook(reference["centroids"]).save(tmp_path / "codebook.safetensors")
    tower = dict(
        clip_model=dict(layers=layers, width=width, image_size=image_size),
        pretrained=str(tmp_path / "tower.pt"),
    )
    codebook = str(tmp_path / "codebook.safetensors")
    kclip = MODELS.build(dict(type="mapet_mm.KCLIP", codebook=codebook, **tower))
    features = kclip.features(reference["images"])
    assert features.shape == reference["features"].shape == (4, 16, 256)
    assert close(features, reference["features"])
    tokens = kclip(reference["images"])
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, reference["codes"])

    same = GridKMeans(build_tower(**tower), image_size, codebook)
    assert torch.equal(same(reference["images"]), reference["codes"])
    assert torch.equal(same.features(reference["images"]), features)
    assert (same.grid, same.dim) == ((4, 4), 256)


def test_grid_features_are_those_that_attention_pooling_gets(reference, weights):
    tower = ModifiedResNet([1, 1, 1, 1], output_dim=32, heads=4, image_size=128, width=8).eval()
    tower.load_state_dict(weights)
    pooled = []
    tower.attnpool.register_forward_pre_hook(lambda _, inputs: pooled.append(inputs[0]))
    with torch.no_grad():
        tower(reference["images"])
        features = grid_features(tower, reference["images"])
    raster = torch.stack([pooled[0][:, :, row, column] for row in range(4) for column in range(4)], dim=1)
    assert torch.equal(features, raster)
    assert (features >= 0).all()


@pytest.mark.parametrize("form", ["safetensors", "half", "no counters"])
def test_weights_files_of_towers_and_of_whole_clip_models_load(reference, weights, tmp_path, form):
    whole = {**{f"visual.{k}": v for k, v in weights.items()}, "text_projection": torch.zeros(3, 3)}
    path = str(tmp_path / "weights.pt")
    if form == "safetensors":
        save_file(whole, path)
    elif form == "half":
        torch.save({name: v.half() if v.is_floating_point() else v for name, v in weights.items()}, path)
    elif form == "no counters":
        kept = {f"module.{name}": value for name, value in whole.items() if "num_batches" not in name}
        torch.save({"state_dict": kept}, path)
    features = KCLIP(REFERENCE, path).features(reference["images"])
    assert features.dtype == torch.float32
    assert close(features, reference["features"], 1e-2 if form == "half" else 1e-5)


def test_a_torchscript_archive_is_loaded_only_if_open_clip_fetched_it(
    reference, weights, tmp_path, monkeypatch
):
    """OpenAI's own files are such archives; to load one runs its code."""
    holder, path = nn.Module(), str(tmp_path / "RN50x64.pt")
    holder.visual = ModifiedResNet([1, 1, 1, 1], output_dim=32, heads=4, image_size=128, width=8).eval()
    holder.visual.load_state_dict(weights)
    holder.forward = lambda images: images
    torch.jit.save(torch.jit.trace_module(holder, {"forward": torch.zeros(1)}), path)
    monkeypatch.setattr(kclip, "weights_file", lambda *_: path)
    assert close(KCLIP(REFERENCE, "openai").features(reference["images"]), reference["features"], 1e-5)
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("the archive's code was run"))
    with pytest.raises(TokenizerError, match="TorchScript"):
        KCLIP(REFERENCE, path)


def test_one_of_two_towers_is_not_chosen_by_chance(weights, tmp_path):
    two = {f"{name}.visual.{k}": v for name in ("clip", "clip_momentum") for k, v in weights.items()}
    torch.save(two, tmp_path / "two.pt")
    with pytest.raises(TokenizerError, match="2 towers"):
        build_tower(REFERENCE, str(tmp_path / "two.pt"))


@pytest.mark.slow
def test_paper_geometry_gives_14_x_14_x_4096_on_a_photograph():
    photograph = torch.from_numpy(load_sample_image("china.jpg").copy())[:427, :427].permute(2, 0, 1)[None]
    image = nn.functional.interpolate(photograph / 255.0, size=448, mode="bicubic", antialias=True)
    config = tower_config("RN50x64")
    assert (config["layers"], config["width"], config["heads"]) == ([3, 15, 36, 10], 128, 64)
    kclip = KCLIP("RN50x64", RANDOM)
    features = kclip.features(image)
    assert features.shape == (1, 196, 4096)
    assert (kclip.grid, kclip.dim, kclip.image_size) == ((14, 14), 4096, 448)
    assert torch.equal(Codebook(features[0, ::2]).assign(features)[0, ::2], torch.arange(98))


def test_random_weights_follow_the_seed_and_use_the_residual_branches():
    """open_clip's initialisation for training leaves them at zero."""
    before = torch.random.get_rng_state()
    first, again, other = (build_tower(SMALL, {"type": "random", "seed": seed}) for seed in (4, 4, 5))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert weights_digest(first) == weights_digest(again) != weights_digest(other)
    assert all(block.bn3.weight.min() > 0 for stage in (first.layer1, first.layer4) for block in stage)


@pytest.mark.parametrize("stride", [32, 16, 8, 4])
def test_a_tower_of_another_stride_sees_the_same_on_a_finer_grid(stride):
    """On an even image every position but those near the border has the same feature, whatever the stride."""
    tower = dict(clip_model=dict(SMALL, layers=[1, 2, 2, 2]), pretrained=RANDOM, image_size=320)
    image = torch.full((1, 3, 320, 320), 0.5)
    plain = KCLIP(**tower).features(image).reshape(10, 10, -1)[5, 5]
    kclip = KCLIP(stride=stride, **tower)
    side = 320 // stride
    features = kclip.features(image).reshape(side, side, -1)
    assert kclip.grid == (side, side)
    torch.testing.assert_close(features[side // 2, side // 2], plain)
    assert kclip.metadata["encoder"].endswith("" if stride == 32 else f" with stride {stride}")


def test_no_codebook_and_one_of_another_encoder_are_refused(codebook):
    with pytest.raises(CodebookError, match="no codebook"):
        KCLIP(SMALL, RANDOM)(torch.zeros(1, 3, 64, 64))
    kclip = KCLIP(SMALL, RANDOM, codebook)
    fitted = Codebook(codebook.centroids, kclip.metadata)
    assert KCLIP(SMALL, RANDOM, fitted).digest == fitted.digest
    assert KCLIP(SMALL, RANDOM, codebook, image_size=96).digest != kclip.digest
    for change, noun in (
        (dict(pretrained={"type": "random", "seed": 1}), "encoder_digest: .*seed 0.*seed 1"),
        (dict(image_size=96), "image_size: 64, now 96"),
    ):
        with pytest.raises(CodebookError, match=noun):
            KCLIP(**{**dict(clip_model=SMALL, pretrained=RANDOM, codebook=fitted), **change})


def test_without_network_one_line_names_the_options(monkeypatch, tmp_path):
    def no_network(*_, **__):
        raise urllib.request.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(TokenizerError, match=r"^.*not known.*'random'.*$"):
        KCLIP()


REFUSED = [
    (dict(clip_model="RN51"), "RN51.*RN50x64"),
    (dict(clip_model="ViT-B-32"), "ViT-B-32"),
    (dict(clip_model="RN50", pretrained="laion"), "openai, yfcc15m, cc12m"),
    (dict(pretrained="openai"), "none"),
    (dict(pretrained="missing/weights.pt"), "neither a file"),
    (dict(pretrained={"type": "randn"}), "type='random'"),
    (dict(stride=24, image_size=48), "`stride` is 24"),
    (dict(image_size=100), "multiple of 32"),
]


@pytest.mark.parametrize(("options", "noun"), REFUSED)
def test_options_that_are_refused(options, noun):
    with pytest.raises(TokenizerError, match=noun):
        KCLIP(**{**dict(clip_model=SMALL, pretrained=RANDOM), **options})


def test_weights_that_do_not_fit_are_refused(weights, tmp_path):
    path = tmp_path / "tower.pt"
    torch.save(weights, path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        build_tower({**SMALL, "width": 16}, str(path))
    torch.save({**weights, "layer4.0.bn1.running_var": torch.full((64,), torch.nan)}, path)
    with pytest.raises(TokenizerError, match=r"`layer4\.0\.bn1\.running_var`"):
        build_tower(REFERENCE, str(path))


def test_a_vit_of_open_clip_is_clustered_without_a_tower_of_ours(tmp_path):
    config = dict(
        embed_dim=16,
        vision_cfg=dict(image_size=32, patch_size=8, width=64, layers=1, head_width=32),
        text_cfg=dict(context_length=8, vocab_size=16, width=16, heads=1, layers=1),
    )
    (tmp_path / "tiny-vit.json").write_text(str(config).replace("'", '"'))
    open_clip.add_model_config(tmp_path / "tiny-vit.json")
    model = open_clip.create_model("tiny-vit").eval()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    encoder = dict(
        type="open_clip.create_model", model_name="tiny-vit", pretrained=str(tmp_path / "weights.pt")
    )
    ours = GridKMeans(encoder, 32, layer="visual.transformer", num_extra_tokens=1)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        (expected,) = model.visual.forward_intermediates(images, indices=1)["image_intermediates"]
    assert torch.equal(ours.features(images), expected.flatten(2).transpose(1, 2))
