"""k-CLIP: the reference's features and tokens, a tower that stays frozen, and weights that must fit."""

import copy
import io
import urllib.request

import numpy as np
import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.runner.checkpoint import get_state_dict
from open_clip.modified_resnet import ModifiedResNet
from safetensors.torch import save_file
from sklearn.datasets import load_sample_image

from mapet_mm.models.target_generators.clip_tower import (
    TowerError,
    build_tower,
    build_visual,
    tower_config,
    weights_digest,
)
from mapet_mm.registry import MODELS
from mapet_mm.structures.codebook import Codebook, CodebookError
from mapet_mm.tokenizers import KCLIP, grid_features

SMALL = {"layers": [1, 1, 1, 1], "width": 8, "image_size": 64}
RANDOM = {"type": "random", "seed": 0}


@pytest.fixture(scope="module")
def reference(data_dir) -> dict[str, torch.Tensor]:
    with np.load(data_dir / "kclip_reference.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


@pytest.fixture(scope="module")
def reference_weights(reference) -> dict[str, torch.Tensor]:
    return {name.removeprefix("w/"): value for name, value in reference.items() if name.startswith("w/")}


@pytest.fixture
def codebook() -> Codebook:
    return Codebook(np.random.default_rng(0).random((9, 256)).astype(np.float32))


def test_features_and_tokens_are_the_references(reference, reference_weights, tmp_path):
    *layers, width, image_size, _ = reference["meta"].tolist()
    torch.save(reference_weights, tmp_path / "tower.pt")
    Codebook(reference["centroids"]).save(tmp_path / "codebook.safetensors")
    kclip = MODELS.build(
        dict(
            type="mapet_mm.KCLIP",
            clip_model=dict(layers=layers, width=width, image_size=image_size),
            pretrained=str(tmp_path / "tower.pt"),
            codebook=str(tmp_path / "codebook.safetensors"),
        )
    )
    features, expected = kclip.features(reference["images"]), reference["features"]
    assert features.shape == expected.shape == (4, 16, 256)
    assert (features - expected).abs().max() <= 1e-5 * expected.abs().max()
    tokens = kclip(reference["images"])
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, reference["codes"])


def test_grid_features_are_those_that_attention_pooling_gets(reference, reference_weights):
    tower = ModifiedResNet([1, 1, 1, 1], output_dim=32, heads=4, image_size=128, width=8).eval()
    tower.load_state_dict(reference_weights)
    pooled = []
    tower.attnpool.register_forward_pre_hook(lambda _, inputs: pooled.append(inputs[0]))
    with torch.no_grad():
        tower(reference["images"])
        features = grid_features(tower, reference["images"])
    raster = torch.stack([pooled[0][:, :, row, column] for row in range(4) for column in range(4)], dim=1)
    assert torch.equal(features, raster)
    assert (features >= 0).all()


@pytest.mark.parametrize("form", ["clip_safetensors", "clip_checkpoint", "torchscript"])
def test_weights_files_of_whole_clip_models_load(reference, reference_weights, tmp_path, form):
    whole = {f"visual.{name}": value for name, value in reference_weights.items()}
    whole["text_projection"] = torch.zeros(3, 3)
    path = (
        tmp_path
        / {"clip_safetensors": "w.safetensors", "clip_checkpoint": "w.pth", "torchscript": "w.pt"}[form]
    )
    if form == "clip_safetensors":
        save_file(whole, path)
    elif form == "clip_checkpoint":
        torch.save({"state_dict": {f"module.{name}": value for name, value in whole.items()}}, path)
    else:
        holder = torch.nn.Module()
        holder.visual = ModifiedResNet([1, 1, 1, 1], output_dim=32, heads=4, image_size=128, width=8).eval()
        holder.visual.load_state_dict(reference_weights)
        holder.forward = lambda images: images
        torch.jit.save(torch.jit.trace_module(holder, {"forward": torch.zeros(1)}), path)
    kclip = KCLIP({**SMALL, "image_size": 128}, str(path))
    expected = reference["features"]
    assert (kclip.features(reference["images"]) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_half_precision_weights_are_computed_in_float32(reference, reference_weights, tmp_path):
    torch.save(
        {
            name: value.half() if value.is_floating_point() else value
            for name, value in reference_weights.items()
        },
        tmp_path / "half.pt",
    )
    features = KCLIP({**SMALL, "image_size": 128}, str(tmp_path / "half.pt")).features(reference["images"])
    assert features.dtype == torch.float32
    assert (features - reference["features"]).abs().max() < 1e-2 * reference["features"].abs().max()


@pytest.mark.slow
def test_paper_geometry_gives_14_x_14_x_4096_on_a_photograph():
    photograph = torch.from_numpy(load_sample_image("china.jpg").copy())[:427, :427].permute(2, 0, 1)[None]
    image = torch.nn.functional.interpolate(photograph / 255.0, size=448, mode="bicubic", antialias=True)
    config = tower_config("RN50x64")
    assert (config["layers"], config["width"], config["heads"]) == ([3, 15, 36, 10], 128, 64)
    kclip = KCLIP("RN50x64", RANDOM)
    features = kclip.features(image)
    assert features.shape == (1, 196, 4096)
    assert (kclip.grid, kclip.dim, kclip.image_size) == ((14, 14), 4096, 448)
    assert torch.isfinite(features).all()
    assert features.std(dim=1).mean() > 0
    assert torch.equal(Codebook(features[0, ::2]).assign(features)[0, ::2], torch.arange(98))


def test_random_weights_follow_the_seed_and_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()
    first, again, other = (build_tower(SMALL, {"type": "random", "seed": seed}) for seed in (4, 4, 5))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert weights_digest(first) == weights_digest(again) != weights_digest(other)
    # The residual branches are used, unlike in open_clip's initialisation for training.
    assert all(block.bn3.weight.min() > 0 for stage in (first.layer1, first.layer4) for block in stage)


def test_train_mode_changes_no_statistics_and_no_token(codebook):
    kclip = KCLIP(SMALL, RANDOM, codebook)
    images = torch.randn(3, 3, 64, 64)
    tokens, digest = kclip(images), weights_digest(kclip.visual)
    kclip.train()
    assert not kclip.training
    assert not any(module.training for module in kclip.visual.modules())
    assert torch.equal(kclip(images), tokens)
    assert weights_digest(kclip.visual) == digest


def test_no_gradient_reaches_the_tower(codebook):
    kclip = KCLIP(SMALL, RANDOM, codebook)
    images = torch.randn(1, 3, 64, 64, requires_grad=True)
    assert not kclip.features(images).requires_grad
    assert not any(parameter.requires_grad for parameter in kclip.visual.parameters())


def test_inside_an_algorithm_the_tower_is_in_neither_checkpoint_nor_optimizer(codebook):
    model = torch.nn.ModuleDict(
        {"backbone": torch.nn.Linear(2, 2), "target_generator": KCLIP(SMALL, RANDOM, codebook)}
    )
    assert sorted(model.state_dict()) == sorted(get_state_dict(model)) == ["backbone.bias", "backbone.weight"]
    assert not model.load_state_dict(copy.deepcopy(model.state_dict())).missing_keys
    optimizer = build_optim_wrapper(model, dict(optimizer=dict(type="SGD", lr=0.1))).optimizer
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2


def test_the_tower_moves_with_the_model(codebook):
    model = torch.nn.Sequential(KCLIP(SMALL, RANDOM, codebook))
    model.to("meta")
    assert {parameter.device.type for parameter in model[0].visual.parameters()} == {"meta"}


def test_autocast_around_the_algorithm_does_not_change_tokens(codebook):
    kclip, images = KCLIP(SMALL, RANDOM, codebook), torch.randn(4, 3, 64, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features, tokens = kclip.features(images), kclip(images)
    assert torch.equal(features, kclip.features(images))
    assert torch.equal(tokens, kclip(images))


def test_images_of_another_size_are_refused(codebook):
    with pytest.raises(ValueError, match=r"takes images of 64 x 64 px, got 96 x 64: resize in the pipeline"):
        KCLIP(SMALL, RANDOM, codebook).features(torch.zeros(1, 3, 96, 64))
    assert KCLIP(SMALL, RANDOM, codebook, image_size=96)(torch.zeros(1, 3, 96, 96)).shape == (1, 9)
    with pytest.raises(ValueError, match="multiple of 32 px, got 100"):
        KCLIP(SMALL, RANDOM, image_size=100)


def test_without_network_one_line_names_the_options(monkeypatch, tmp_path):
    def no_network(*_, **__):
        raise urllib.request.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(TowerError) as error:
        KCLIP()
    line = str(error.value)
    assert "\n" not in line
    for part in (
        "'openai' weights of RN50x64",
        "not known",
        "pretrained='/path",
        "dict(_delete_=True, type='mapet_mm.KCLIP'",
        "type='random'",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("clip_model", "pretrained", "message"),
    [
        ("RN51", "openai", r"'RN51' is not a model of open_clip: choose one of .*RN50x64"),
        ("ViT-B-32", "openai", r"'ViT-B-32' has no ResNet tower: choose one of"),
        ("RN50", "laion", r"no weights 'laion' for RN50: open_clip has openai, yfcc15m, cc12m; give a local"),
        (SMALL, "openai", r"no weights 'openai' for ModifiedResNet-1-1-1-1-width8: it has none in open_clip"),
        (SMALL, "missing/weights.pt", r"`missing/weights.pt` \(option `pretrained`\) does not exist"),
        ({"width": 8}, RANDOM, r"clip_model given as a dict lacks image_size, layers"),
        (SMALL, {"type": "randn"}, r"dict\(type='random', seed=<int>\)"),
    ],
)
def test_wrong_options_are_one_clear_line(clip_model, pretrained, message):
    with pytest.raises(TowerError, match=message):
        KCLIP(clip_model, pretrained)


def test_weights_beside_the_towers_option_are_refused():
    """Before: the tower had the weights of `pretrained`, whatever `init_cfg` named."""
    with pytest.raises(TowerError, match=r"`init_cfg` of KCLIP loads nothing: .* into `pretrained`"):
        KCLIP(SMALL, RANDOM, init_cfg=dict(type="Pretrained", checkpoint="tower.pth"))


def test_a_towers_file_without_counters_of_training_loads(reference_weights, tmp_path):
    counters = [name for name in reference_weights if name.endswith("num_batches_tracked")]
    few = {name: value for name, value in reference_weights.items() if name not in counters}
    torch.save(few, tmp_path / "few.pt")
    tower = build_tower(SMALL, str(tmp_path / "few.pt"))
    assert len(few) < len(tower.state_dict())
    for name, value in tower.state_dict().items():
        assert torch.equal(value, few.get(name, torch.tensor(0))), name


@pytest.mark.parametrize("name", ["layer2.0.conv1.weight", "layer4.0.bn1.running_var"])
def test_a_towers_weights_that_are_not_finite_are_refused(reference_weights, tmp_path, name):
    weights = {key: value.clone() for key, value in reference_weights.items()}
    weights[name].view(-1)[3] = float("nan")
    torch.save(weights, tmp_path / "nan.pt")
    with pytest.raises(TowerError, match=rf"nan\.pt` holds NaN or infinity, in `{name}` first: its training"):
        build_tower(SMALL, str(tmp_path / "nan.pt"))


def test_weights_of_another_architecture_and_truncated_files_are_refused(reference_weights, tmp_path):
    torch.save(reference_weights, tmp_path / "small.pt")
    with pytest.raises(TowerError, match=r"small\.pt` does not fit the tower's architecture"):
        KCLIP({**SMALL, "width": 16}, str(tmp_path / "small.pt"))
    buffer = io.BytesIO()
    torch.save(reference_weights, buffer)
    (tmp_path / "half.pt").write_bytes(buffer.getvalue()[: buffer.tell() // 2])
    with pytest.raises(TowerError, match=r"half\.pt` is truncated or holds no state dict") as error:
        KCLIP(SMALL, str(tmp_path / "half.pt"))
    assert "\n" not in str(error.value)


def test_a_codebook_of_another_encoder_is_refused(codebook):
    with pytest.raises(CodebookError, match=r"the codebook has 5 channels, encoder .*width8 gives 256"):
        KCLIP(SMALL, RANDOM, Codebook(np.zeros((3, 5))))
    kclip = KCLIP(SMALL, RANDOM, codebook)
    fitted = Codebook(codebook.centroids, kclip.metadata)
    assert KCLIP(SMALL, RANDOM, fitted).digest == fitted.digest
    with pytest.raises(CodebookError, match=r"fitted with encoder_digest .*seed 0.*this KCLIP has .*seed 1"):
        KCLIP(SMALL, {"type": "random", "seed": 1}, fitted)
    with pytest.raises(CodebookError, match=r"fitted with image_size 64 .*this KCLIP has 96"):
        KCLIP(SMALL, RANDOM, fitted, image_size=96)


def test_tokens_without_a_codebook_are_refused():
    kclip = KCLIP(SMALL, RANDOM)
    assert kclip.features(torch.zeros(1, 3, 64, 64)).shape == (1, 4, 256)
    with pytest.raises(CodebookError, match="KCLIP has no codebook: give `codebook=<path>`"):
        kclip(torch.zeros(1, 3, 64, 64))


def test_options_of_other_towers_are_refused_before_one_is_built():
    with pytest.raises(
        TowerError, match=r"`stride` is 8, but only ResNets take one: leave it out for ViT-L-14"
    ):
        build_visual("ViT-L-14", "openai", stride=8)
    small = dict(layers=[1, 1, 1, 1], width=8, image_size=32)
    with pytest.raises(TowerError, match=r"is dict\(type='random', seed=<int>\) and nothing else"):
        build_tower(small, dict(type="random", sead=1))
