"""`mapet-mm pretrain --init`: what it takes, and exports of the start's class with its features."""

import json
import re
import runpy
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import starts
import timm
import torch
import transformers
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmpretrain.visualization import UniversalVisualizer
from PIL import Image
from starts import OF_HUGGING_FACE, OF_TIMM, SIDE, save_hugging_face, save_timm

from mapet_mm.cli import pretrain as command
from mapet_mm.cli.change import SHARES
from mapet_mm.cli.pretrain import parse_args, pretrain
from mapet_mm.cli.start_models import training_side
from mapet_mm.cli.starts import Start, take_start
from mapet_mm.cli.token_choices import init_tokens
from mapet_mm.engine.optimizers.layer_decay import Depths
from mapet_mm.evaluation.models import load_model
from mapet_mm.interop.description import Preparation
from mapet_mm.interop.export import write_export
from mapet_mm.models import TIMMViT
from mapet_mm.registry import MODELS
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.run_folder import INIT
from mapet_mm.weight_files import read_checkpoint, read_weights, write_weights

STARTS = [("timm", kind) for kind in OF_TIMM] + [("hf", kind) for kind in OF_HUGGING_FACE]
NAMES = [f"{library}: {kind}" for library, kind in STARTS]


@pytest.fixture(autouse=True)
def _quiet():
    MMLogger.get_current_instance().setLevel("ERROR")


def save(library: str, kind: str, folder: Path, **options: object) -> tuple[str, torch.nn.Module]:
    """A start's name for --init, and its network."""
    network = (save_timm if library == "timm" else save_hugging_face)(kind, folder, **options)
    return f"{library}:{'local-dir:' if library == 'timm' else ''}{folder}", network


def export(run: Path, checkpoint: Path) -> None:
    weights, meta = read_checkpoint(checkpoint)
    write_export(run / "timm", "timm", weights, meta)
    if meta["exports"]["hf"]:
        write_export(run / "huggingface", "hf", weights, meta)


@torch.no_grad()
def tokens_of(network: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    """All tokens after the final norm."""
    network.eval()
    if hasattr(network, "forward_features"):
        return network.forward_features(images)
    return network(images).last_hidden_state


def in_timm(run: Path) -> torch.nn.Module:
    return timm.create_model(f"local-dir:{run}/timm", pretrained=True)


def in_hugging_face(run: Path) -> torch.nn.Module:
    return transformers.AutoModel.from_pretrained(run / "huggingface")


@torch.no_grad()
def training_network(start: Start, run: Path) -> torch.nn.Module:
    """The backbone of the training's config, with the weights in RUN."""
    vit = MODELS.build(start.network)
    weights = {name.removeprefix("backbone."): value for name, value in read_weights(run / INIT).items()}
    assert set(vit.load_state_dict(weights, strict=False).missing_keys) <= {"mask_token"}
    vit.eval()  # MMPretrain's backbones return None
    return vit


@pytest.mark.parametrize(("library", "kind"), STARTS, ids=NAMES)
def test_with_no_epoch_the_exports_and_the_training_compute_what_the_start_does(library, kind, tmp_path):
    name, network = save(library, kind, tmp_path / "start")
    start = take_start(name, tmp_path, None)
    export(tmp_path, tmp_path / INIT)
    images = torch.randn(2, 3, SIDE, SIDE)
    expected = tokens_of(network, images)

    # Exports: timm's are the start's bits, where it adds the same to the variance; Hugging Face's to 1e-6.
    of_timm = tokens_of(in_timm(tmp_path), images)
    if library == "timm":
        assert torch.equal(of_timm, expected)
    else:
        tolerance = 1e-6 if start.network.get("norm_eps") is None else 1e-4
        torch.testing.assert_close(of_timm, expected, rtol=tolerance, atol=tolerance)
    kind_there = OF_TIMM[kind][2] if library == "timm" else network.config.model_type
    assert (tmp_path / "huggingface").exists() == (kind_there is not None)
    if kind_there in transformers.CONFIG_MAPPING:  # before its 4.56, transformers has no DINOv3
        elsewhere = in_hugging_face(tmp_path)
        assert elsewhere.config.model_type == kind_there
        torch.testing.assert_close(tokens_of(elsewhere, images), expected, rtol=1e-6, atol=1e-6)

    # The training's network, and the features that --tokenizer init clusters: all after the final norm, which
    # some of timm's networks have after pooling.
    with torch.no_grad():
        normed = getattr(network, "fc_norm", torch.nn.Identity())(expected)
        patches = normed[:, -(start.grid**2) :]
        (whole,) = training_network(start, tmp_path).encode(images)
        (as_map,) = TIMMViT(str(tmp_path / INIT)).eval()(images)
    torch.testing.assert_close(as_map.flatten(2).mT, patches, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole[:, 1:], patches, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole[:, 0], normed[:, 0], rtol=1e-5, atol=1e-5)
    config = init_tokens(start).config
    config["encoder"]["init_cfg"]["checkpoint"] = str(tmp_path / INIT)
    clustered = MODELS.build(config).features(images)
    tolerance = 1e-5 if start.network.get("norm_eps") is None else 1e-3  # MMPretrain's class has timm's eps
    torch.testing.assert_close(clustered, patches, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["vit", "dinov2 with registers"])
def test_a_start_is_continued_on_other_bands_and_exported_with_them(kind, tmp_path):
    """The start's RGB weights are inflated as the training's network loads them."""
    name, _ = save("timm", kind, tmp_path / "start")
    start = take_start(name, tmp_path, None)
    mean, std = [0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]
    vit = MODELS.build({**start.network, "in_channels": 4}).eval()
    weights = {name.removeprefix("backbone."): value for name, value in read_weights(tmp_path / INIT).items()}
    vit.load_state_dict(weights, strict=False)
    trained = {f"backbone.{name}": value for name, value in vit.state_dict().items()}
    write_weights(tmp_path / "trained.pth", trained, dict(exports=asdict(start.vit.with_bands(mean, std))))
    export(tmp_path, tmp_path / "trained.pth")

    images = torch.randn(2, 4, SIDE, SIDE)
    model = in_timm(tmp_path)
    assert model.pretrained_cfg["mean"] == mean
    of_timm = tokens_of(model, images)
    of_hugging_face = tokens_of(in_hugging_face(tmp_path), images)
    torch.testing.assert_close(of_hugging_face, of_timm, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        (whole,) = vit.encode(images)
    torch.testing.assert_close(whole[:, 0], of_timm[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "side", "grid"), [("timm: vit", 64, 8), ("hf: dinov2", 48, 6)])
def test_a_start_takes_the_image_size_that_is_asked_for(kind, side, grid, tmp_path):
    library, kind = kind.split(": ")
    name, _ = save(library, kind, tmp_path / "start")
    start = take_start(name, tmp_path, None, side)
    assert start.grid == grid
    assert start.images.img_size == (side, side)
    export(tmp_path, tmp_path / INIT)
    images = torch.randn(1, 3, side, side)
    with torch.no_grad():
        (whole,) = training_network(start, tmp_path).encode(images)
    torch.testing.assert_close(whole, tokens_of(in_timm(tmp_path), images), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="--image-size 44 is no multiple"):
        take_start(name, tmp_path, None, 44)


def test_exports_have_the_starts_config_and_images(tmp_path):
    save_timm("dinov2 with registers", tmp_path / "timm start")
    take_start(str(tmp_path / "timm start"), tmp_path, None)  # the library is found out
    export(tmp_path, tmp_path / INIT)
    model = in_timm(tmp_path)
    assert model.pretrained_cfg["architecture"] == "vit_small_patch14_reg4_dinov2"
    data = timm.data.resolve_model_data_config(model)
    start = timm.create_model(f"local-dir:{tmp_path}/timm start")
    assert data == timm.data.resolve_model_data_config(start)
    assert (data["mean"], data["crop_pct"], data["interpolation"]) == ([0.4, 0.5, 0.6], 0.875, "bilinear")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "huggingface")
    assert (tuple(processor.image_mean), processor.size["shortest_edge"]) == ((0.4, 0.5, 0.6), 36)

    for kind in OF_HUGGING_FACE:
        folder = tmp_path / kind
        network = save_hugging_face(kind, folder / "start")
        take_start(str(folder / "start"), folder, None)
        export(folder, folder / INIT)
        there = in_hugging_face(folder)
        for config in (network.config, there.config):
            config._name_or_path = config.architectures = config.dtype = None
            config._attn_implementation_autoset = None  # transformers 4.49 sets it where a model is loaded
            config.pooler_act = "linear"  # exports' poolers are identities
        assert there.config.to_dict() == network.config.to_dict()
        processors = [
            transformers.AutoImageProcessor.from_pretrained(folder / name)
            for name in ("start", "huggingface")
        ]
        assert processors[0].to_dict() == processors[1].to_dict()


@pytest.mark.parametrize("library", ["timm", "hf"])
def test_a_vits_pooler_gives_its_class_token(library, tmp_path):
    """`AutoModel` adds one with random weights to a ViT of Hugging Face whose file has none."""
    name, _ = save(library, "vit", tmp_path / "start")
    take_start(name, tmp_path, None)
    export(tmp_path, tmp_path / INIT)
    with torch.no_grad():
        output = in_hugging_face(tmp_path)(torch.randn(2, 3, SIDE, SIDE))
    assert torch.equal(output.pooler_output, output.last_hidden_state[:, 0])


def test_a_start_whose_images_are_squashed_before_their_crop_is_exported_so(tmp_path):
    """As of DeiT: the same image for Hugging Face, timm and the tests of the training."""
    save("hf", "vit", tmp_path / "start")
    whole, crop = dict(height=40, width=40), dict(height=SIDE, width=SIDE)
    processor = transformers.DeiTImageProcessor(size=whole, crop_size=crop, rescale_factor=1 / 127.5)
    processor.save_pretrained(tmp_path / "start")
    start = take_start(str(tmp_path / "start"), tmp_path, None)
    export(tmp_path, tmp_path / INIT)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3)).astype(np.uint8))
    (expected,) = processor(picture, return_tensors="pt")["pixel_values"]
    config = timm.data.resolve_model_data_config(in_timm(tmp_path))
    of_timm = timm.data.create_transform(**config)(picture)
    again = transformers.BitImageProcessor(**start.images.in_hugging_face())
    for image in (of_timm, *again(picture, return_tensors="pt")["pixel_values"]):
        assert (image - expected).abs().mean() < 2e-3 * expected.std()


LARGE = 136  # pixels in patches of 8: more than the 16 x 16 that are trained on


@pytest.mark.parametrize("kind", ["vit", "dinov2", "dinov2 with registers", "dinov3", "eva02, swiglu"])
def test_timm_resizes_the_positions_of_larger_images(kind, tmp_path):
    name, _ = save("timm", kind, tmp_path / "start", img_size=LARGE)
    start = take_start(name, tmp_path, None)
    assert (start.images.img_size, start.images.resize, start.grid) == ((128, 128), 146, 16)
    export(tmp_path, tmp_path / INIT)
    small = timm.create_model(f"local-dir:{tmp_path}/start", pretrained=True, img_size=128)
    images = torch.randn(1, 3, 128, 128)
    assert torch.equal(tokens_of(in_timm(tmp_path), images), tokens_of(small, images))


@pytest.mark.parametrize("kind", ["dinov2", "registers", "dinov3"])
def test_hugging_face_resizes_its_own_positions(kind, tmp_path):
    name, network = save("hf", kind, tmp_path / "start", image_size=LARGE)
    processor = transformers.BitImageProcessor(
        size=dict(shortest_edge=LARGE), crop_size=dict(height=LARGE, width=LARGE)
    )
    processor.save_pretrained(tmp_path / "start")
    assert take_start(name, tmp_path, None).grid == 16
    export(tmp_path, tmp_path / INIT)
    images = torch.randn(1, 3, 128, 128)
    expected = tokens_of(network, images)
    for exported in (in_hugging_face(tmp_path), in_timm(tmp_path)):
        torch.testing.assert_close(tokens_of(exported, images), expected, rtol=1e-5, atol=1e-5)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "huggingface")
    assert (processor.crop_size["height"], processor.size["shortest_edge"]) == (128, 128)


@pytest.mark.parametrize(
    ("size", "patch", "side"),
    [
        (224, 16, 224),
        (256, 16, 256),
        (518, 14, 224),
        (336, 14, 224),
        (512, 16, 224),
        (224, 8, 128),
        (98, 16, 96),
    ],
)
def test_the_training_has_at_most_256_tokens_an_image(size, patch, side):
    images = Preparation((size, size), (0.5,) * 3, (0.5,) * 3, size, "bicubic")
    assert training_side(images, patch) == side


def no_model(folder: Path) -> str:
    folder.mkdir()
    return str(folder)


def convolutional(folder: Path) -> str:
    timm.models.save_for_hf(timm.create_model("resnet10t"), str(folder), safe_serialization=True)
    return f"timm:local-dir:{folder}"


def gelu_of_another_kind(folder: Path) -> str:
    return save("hf", "dinov2", folder, hidden_act="gelu_new")[0]


def beit(folder: Path) -> str:
    config = transformers.BeitConfig(**starts.SIZES, intermediate_size=48)
    transformers.BeitModel(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size=dict(height=SIDE, width=SIDE)).save_pretrained(folder)
    return f"hf:{folder}"


def without_class_token(folder: Path) -> str:
    return save("timm", "vit", folder, class_token=False, global_pool="avg")[0]


def attention_pooling(folder: Path) -> str:
    return save("timm", "vit", folder, global_pool="map")[0]


def not_finite(folder: Path) -> str:
    name, network = save("timm", "vit", folder)
    network.norm.weight.data[0] = torch.nan
    timm.models.save_for_hf(network, str(folder), safe_serialization=True)
    return name


def unfinished_run(folder: Path) -> str:
    folder.mkdir()
    (folder / "pretrain.py").write_text('work_dir = "training"\n')
    return str(folder)


REFUSED = [
    (lambda _: "timm:vit_enormous_patch14", "vit_enormous"),
    (lambda _: "hf:/nowhere", "nowhere"),
    (lambda _: "/nowhere.pth", "does not exist"),
    (no_model, "folder"),
    (convolutional, "ResNet"),
    (beit, "beit"),
    (gelu_of_another_kind, "hidden_act"),
    (without_class_token, "class_token"),
    (attention_pooling, "global_pool"),
    (not_finite, "finite"),
    (unfinished_run, "epoch_N"),
]


@pytest.mark.parametrize(("make", "noun"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_cannot_be_continued_is_refused_and_nothing_is_written(make, noun, tmp_path):
    with pytest.raises(UserError, match=noun) as error:
        take_start(make(tmp_path / "start"), tmp_path / "run", None)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / INIT).exists()
    if make is not unfinished_run and "nowhere" not in str(error.value):
        assert "hf:NAME_OR_FOLDER" in str(error.value)


class Toucher:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        Path(path).touch()

    def __reduce__(self):
        return Toucher, (self.path,)


@pytest.mark.parametrize("library", ["timm", "hf"])
def test_a_start_runs_nothing_that_its_file_names(library, tmp_path):
    """Not even what the process allows, as MMEngine does for `getattr`."""
    name, network = save(library, "vit", tmp_path / "start")
    (tmp_path / "start/model.safetensors").unlink()
    canary = tmp_path / "canary"
    weights = dict(network.state_dict(), other=Toucher(str(canary)))
    torch.save(weights, tmp_path / "start/pytorch_model.bin")
    canary.unlink()
    with torch.serialization.safe_globals([Toucher]), pytest.raises(UserError):
        take_start(name, tmp_path, None)
    assert not canary.exists()


@pytest.mark.parametrize(("target", "noun"), [("torchvision", "torchvision"), ("hf", "Hugging Face")])
def test_exports_are_of_the_starts_libraries(target, noun, tmp_path):
    name, _ = save("timm", "eva02, swiglu", tmp_path / "start")
    take_start(name, tmp_path, None)
    weights, meta = read_checkpoint(tmp_path / INIT)
    with pytest.raises(ValueError, match=noun):
        write_export(tmp_path / "out.pth", target, weights, meta)


def test_another_runs_last_checkpoint_is_a_start(tmp_path):
    network = timm.create_model("deit_tiny_patch16_224")
    torch.save(network.state_dict(), tmp_path / "deit.pth")
    take_start(str(tmp_path / "deit.pth"), tmp_path, None)
    earlier = tmp_path / "earlier"
    (earlier / "training").mkdir(parents=True)
    (earlier / "pretrain.py").write_text('work_dir = "training"\n')
    shutil.move(tmp_path / INIT, earlier / "training/epoch_10.pth")
    (earlier / "training/epoch_9.pth").write_bytes(b"older")
    start = take_start(str(earlier), tmp_path / "run", None)
    assert (start.arch, start.grid, "epoch_10.pth" in start.words[0]) == ("tiny", 14, True)
    weights = read_weights(tmp_path / "run" / INIT)
    assert torch.equal(weights["backbone.layers.3.attn.qkv.weight"], network.blocks[3].attn.qkv.weight)


def test_a_models_size_is_its_own(tmp_path):
    name, _ = save("timm", "vit", tmp_path / "start")
    with pytest.raises(UserError, match="--arch"):
        take_start(name, tmp_path, "tiny")


def test_layers_of_timms_networks_have_depths(tmp_path):
    name, _ = save("timm", "dinov2 with registers", tmp_path / "start")
    model = torch.nn.Module()
    model.backbone = MODELS.build(take_start(name, tmp_path, None).network)
    depths = Depths(model)
    vit = "backbone.timm_model."
    expected = {"reg_token": 0, "patch_embed.proj.bias": 0, "blocks.1.ls1.gamma": 2, "norm.bias": 3}
    assert {name: depths.of(vit + name) for name in expected} == {k: (v, 4) for k, v in expected.items()}
    assert depths.of("backbone.mask_token") == depths.of("head.weight") == (3, 4)


@pytest.fixture
def photographs(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "mine").mkdir()
    for number in range(8):
        coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
        coarse.resize((60, 50)).save(tmp_path / f"mine/{number}.png")
    return tmp_path / "mine"


@pytest.fixture
def in_process(monkeypatch):
    """The stages run here, one after the other: a process of each would import everything again."""

    def run_here(stages, folder, held) -> None:
        for stage in stages:
            _, tool, *arguments = stage.command
            UniversalVisualizer._instance_dict.clear()  # or a run of the same second gets the last one's
            with monkeypatch.context() as patch:
                patch.chdir(folder)
                patch.setattr(sys, "argv", [tool, *arguments])
                patch.syspath_prepend(str(Path(tool).parent))
                runpy.run_path(tool, run_name="__main__")

    monkeypatch.setattr(command, "run_stages", run_here)


def continue_start(photographs: Path, run: Path, name: str, *more: str) -> None:
    options = ["--epochs", "1", "--batch-size", "4", "--workers", "0", *more]
    pretrain(parse_args([str(photographs), "--out", str(run), "--init", name, *options]))


@pytest.mark.slow
@pytest.mark.parametrize(("library", "kind"), STARTS, ids=NAMES)
def test_an_epoch_trains_the_start_and_exports_it(library, kind, photographs, in_process, tmp_path, capsys):
    name, network = save(library, kind, tmp_path / "start")
    run = tmp_path / "run"
    continue_start(photographs, run, name)
    assert "tokens: clusters of the features of --init" in capsys.readouterr().out

    images = torch.randn(2, 3, SIDE, SIDE)
    trained = tokens_of(in_timm(run), images)
    change = (trained - tokens_of(network, images)).abs().mean()
    assert 1e-5 < change < 0.5  # the mean of a token's values is about 1
    if (run / "huggingface").exists():
        torch.testing.assert_close(tokens_of(in_hugging_face(run), images), trained, rtol=1e-3, atol=1e-3)

    # Without the start, from another folder: it resumes, trains longer, and is a start itself.
    shutil.rmtree(tmp_path / "start")
    moved = run.rename(tmp_path / "moved")
    continue_start(photographs, moved, name)
    assert torch.equal(tokens_of(in_timm(moved), images), trained)
    continue_start(photographs, moved, name, "--epochs", "2")
    assert not torch.equal(tokens_of(in_timm(moved), images), trained)
    again = take_start(str(moved), tmp_path / "again", None)
    assert "(epoch_2.pth)" in again.words[0]
    export(tmp_path / "again", tmp_path / "again" / INIT)
    assert torch.equal(tokens_of(in_timm(tmp_path / "again"), images), tokens_of(in_timm(moved), images))
    assert "backbone.mask_token" in read_weights(tmp_path / "again" / INIT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "changed"),
    [
        ("attention", ("attn.proj.weight", "attn.proj.bias")),
        ("lora", ("attn.qkv.weight", "attn.proj.weight")),
    ],
)
def test_a_training_of_the_attention_alone_leaves_the_rest_of_the_start(
    trained, changed, photographs, in_process, tmp_path
):
    name, network = save("timm", "dinov2", tmp_path / "start")
    run = tmp_path / "run"
    continue_start(photographs, run, name, "--train", trained)
    before = network.state_dict()
    after = in_timm(run).state_dict()
    assert {key for key, value in after.items() if not torch.equal(value, before[key])} == {
        f"blocks.{index}.{part}" for index in (0, 1) for part in changed
    }
    images = torch.randn(2, 3, SIDE, SIDE)
    features = tokens_of(in_timm(run), images)
    torch.testing.assert_close(tokens_of(in_hugging_face(run), images), features, rtol=1e-3, atol=1e-3)
    if trained == "lora":
        saved = read_weights(run / "training/epoch_1.pth")
        for key in [key for key in after if key.endswith(changed)]:
            adapter = f"adapters.backbone.timm_model.{key.removesuffix('weight')}parametrizations.weight"
            assert torch.equal(saved[f"{adapter}.original"], before[key])
            update = saved[f"{adapter}.0.B"] @ saved[f"{adapter}.0.A"]
            assert torch.equal(after[key], before[key] + update)
    # As a backbone for OpenMMLab, and as another training's start.
    with torch.no_grad():
        (as_map,) = TIMMViT(str(run)).eval()(images)
    torch.testing.assert_close(as_map.flatten(2).mT, features[:, 1:], rtol=1e-5, atol=1e-5)
    take_start(str(run), tmp_path / "again", None)
    export(tmp_path / "again", tmp_path / "again" / INIT)
    assert torch.equal(tokens_of(in_timm(tmp_path / "again"), images), features)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [SHARES, (0,)])
def test_a_share_of_the_change_is_kept_and_exported(shares, in_process, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mapet_mm.cli.change.SHARES", shares)
    name, network = save("timm", "dinov2", tmp_path / "start")
    random = np.random.default_rng(0)
    for index in range(200):
        path = tmp_path / "images" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(path)
    run = tmp_path / "run"
    continue_start(tmp_path / "images", run, name, "--change", "knn", "--batch-size", "64")
    printed = capsys.readouterr().out
    assert "change: 7 of the tested images choose" in printed
    kept = float(re.search(r"kept: (\S+) of the change", printed)[1])
    before, after = network.state_dict(), in_timm(run).state_dict()
    trained = read_weights(run / "training/epoch_1.pth")
    for key, value in after.items():
        expected = before[key].lerp(trained[f"backbone.timm_model.{key}"], kept)
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    assert f"| kept of the change of the start | {kept:g} |" in (run / "timm/README.md").read_text()
    verdict = json.loads((run / "verdict.json").read_text())
    assert (verdict["num_images"], verdict["compared_with"]) == (13, "its start")
    if not kept:
        assert verdict["sentence"].startswith("No gain seen over the start's weights (k-NN +0.0 points")


@pytest.fixture
def planned(monkeypatch) -> None:
    monkeypatch.setattr(command, "run_stages", lambda *_: None)


def test_a_run_keeps_the_weights_that_it_started_from(photographs, planned, tmp_path):
    name, _ = save("timm", "vit", tmp_path / "start")
    run = tmp_path / "run"
    continue_start(photographs, run, name)
    identity = json.loads((run / "identity.json").read_text())
    assert set(identity["start"]) == {"weights", "source"}
    shutil.move(tmp_path / "start", tmp_path / "gone")
    continue_start(photographs, run, name)  # the source has gone
    continue_start(photographs, run, name.replace("start", "gone"))  # and lies there
    with pytest.raises(UserError, match=r"init: .*start, now .*nowhere"):
        continue_start(photographs, run, name.replace("start", "nowhere"))

    save("timm", "dinov2", tmp_path / "start")
    with pytest.raises(UserError, match=r"start\.source"):
        continue_start(photographs, run, name)
    shutil.rmtree(tmp_path / "start")
    (run / INIT).write_bytes((run / INIT).read_bytes() + b" ")
    with pytest.raises(UserError, match=r"start\.weights"):
        continue_start(photographs, run, name)


def test_the_configs_follow_the_starts_images_and_grid(photographs, planned, tmp_path):
    name, _ = save("timm", "dinov3", tmp_path / "start")
    continue_start(photographs, tmp_path / "run", name)
    tokens, training = (Config.fromfile(tmp_path / "run" / file) for file in ("tokenizer.py", "pretrain.py"))
    steps = tokens.dataset[0].pipeline
    assert steps[:3] == training.train_dataloader.dataset.pipeline[:3]
    assert (steps[1].scale, steps[1].interpolation, steps[2].crop_size) == (36, "bilinear", SIDE)
    assert tokens.data_preprocessor.mean == training.data_preprocessor.mean == [102.0, 127.5, 153.0]
    assert training.model.backbone.cutting_point == 5 + 4  # class token, four registers, a quarter of 4 x 4
    assert "train_backbone" not in training.model
    continue_start(photographs, tmp_path / "a part", name, "--train", "attention")
    assert Config.fromfile(tmp_path / "a part/pretrain.py").model.train_backbone == "attention"
    with pytest.raises(UserError, match="train"):
        continue_start(photographs, tmp_path / "a part", name)
    config = load_model(str(tmp_path / "run/pretrain.py"), str(tmp_path / "run" / INIT)).config
    assert config.test_dataloader.dataset.pipeline[1:3] == steps[1:3]  # for `mapet-mm evaluate`
    # No path that a moved RUN would miss.
    assert str(tmp_path / "start") not in (tmp_path / "run/pretrain.py").read_text()


@pytest.mark.parametrize(
    ("width", "asked", "rate", "decay"),
    [
        (192, [], 1.5e-3 / 4, None),  # for the 4 images of a step: a quarter of that for 64
        (204, [], 3e-4 / 4, 0.75),
        (204, ["--lr", "1e-3", "--layer-decay", "1"], 1e-3, None),
        (192, ["--layer-decay", "0.9"], 1.5e-3 / 4, 0.9),
    ],
)
def test_wide_starts_learn_slowly_unless_asked(width, asked, rate, decay, photographs, planned, tmp_path):
    name, _ = save("timm", "vit", tmp_path / "start", embed_dim=width)
    continue_start(photographs, tmp_path / "run", name, *asked)
    wrapper = Config.fromfile(tmp_path / "run/pretrain.py").optim_wrapper
    assert wrapper.optimizer.lr == pytest.approx(rate)
    assert wrapper.get("paramwise_cfg") == (dict(layer_decay_rate=decay) if decay else None)


def test_visible_mim_continues_a_start_with_a_predictor_of_its_width(photographs, planned, tmp_path):
    name, _ = save("timm", "dinov3", tmp_path / "start")
    continue_start(photographs, tmp_path / "run", name, "--method", "visible-mim")
    training = Config.fromfile(tmp_path / "run/pretrain.py")
    model = MODELS.build(training.model)
    assert model.backbone.cutting_point == 5 + 8  # class token, four registers, half of 4 x 4
    assert model.neck.layers[0].attn.embed_dim == model.backbone.embed_dims
    tokens = torch.randint(training.model.head.vocab_size, (2, 4, 4))
    losses = model([torch.randn(2, 3, SIDE, SIDE), tokens], mode="loss")
    losses["loss"].backward()
    assert all(weights.grad is not None for weights in model.parameters() if weights.requires_grad)
