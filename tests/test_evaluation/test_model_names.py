"""Models by name: their own weights and preparation of images, offline, as their libraries give them."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import transformers
from foreign_models import save_hugging_face, save_timm
from huggingface_hub.utils import GatedRepoError, RepositoryNotFoundError
from mmcv.transforms import Compose
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmpretrain.registry import TRANSFORMS
from PIL import Image

from mapet_mm.cli.starts import take_start
from mapet_mm.evaluation.libraries import LIBRARIES
from mapet_mm.evaluation.models import find_model, load_checkpoint, load_model, random_twin
from mapet_mm.interop.convert import hf_to_mm, mm_to_timm
from mapet_mm.interop.description import ENTRY, Description
from mapet_mm.interop.export import write_export
from mapet_mm.models import MaPeTViT
from mapet_mm.utils.errors import UserError
from mapet_mm.weight_files import read_weights

CLOSE = dict(atol=1e-4, rtol=1e-4)


@pytest.fixture
def picture(tmp_path) -> str:
    rough = np.random.default_rng(0).integers(0, 256, (7, 9, 3)).astype(np.uint8)
    Image.fromarray(rough).resize((57, 43), Image.BICUBIC).save(tmp_path / "picture.png")
    return str(tmp_path / "picture.png")


def prepared(loaded, picture: str) -> torch.Tensor:
    """The image as the evaluation hands it to the network."""
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        steps = [TRANSFORMS.build(step) for step in loaded.config.test_dataloader.dataset.pipeline]
    return loaded.backbone.normalise(Compose(steps)(dict(img_path=picture))["inputs"][None])


@pytest.mark.parametrize("name", ["timm:local-dir:{}", "{}"])
def test_a_vit_of_timm_with_registers(tmp_path, picture, name):
    """By timm's name of a folder, or by the folder alone."""
    save_timm(tmp_path / "vit")
    network = timm.create_model(f"local-dir:{tmp_path / 'vit'}", pretrained=True).eval()
    loaded = load_model(name.format(tmp_path / "vit"))
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network))
    images = prepared(loaded, picture)
    torch.testing.assert_close(images[0], transform(Image.open(picture)))
    with torch.no_grad():
        expected, tokens = network.forward_features(images), loaded.backbone(images)
    assert (tokens.grid, tokens.names) == ((4, 4), ["1", "2", "output"])
    torch.testing.assert_close(tokens.class_token[:, -1], expected[:, 0], **CLOSE)
    torch.testing.assert_close(tokens.patches[-1], expected[:, 3:], **CLOSE)


SMALL = dict(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=48,
    image_size=28,
    patch_size=7,
)


@pytest.mark.parametrize("kind", ["vit", "dinov2", "registers"])
def test_a_vit_of_hugging_face(tmp_path, picture, kind):
    """From its folder; and its file, in which modules have other names, as the checkpoint of a config."""
    network = save_hugging_face(kind, tmp_path / kind)
    loaded = load_model(f"hf:{tmp_path / kind}")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / kind)
    images = prepared(loaded, picture)
    expected = processor(Image.open(picture), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(images, expected, atol=0.03, rtol=0)  # it rounds otherwise, by 1 of 255
    assert (images - expected).abs().mean() < 5e-4
    with torch.no_grad():
        expected, tokens = network(images).last_hidden_state, loaded.backbone(images)
    assert tokens.grid == (4, 4)
    torch.testing.assert_close(tokens.class_token[:, -1], expected[:, 0], **CLOSE)
    torch.testing.assert_close(tokens.patches[-1], expected[:, -16:], **CLOSE)
    config = loaded.config
    config["model"] = dict(type="HuggingFaceClassifier", model_name=str(tmp_path / kind))
    for checkpoint in (tmp_path / kind, tmp_path / kind / "model.safetensors"):
        for again in (
            load_checkpoint(config, str(checkpoint)),
            load_model(f"hf:{tmp_path / kind}", str(checkpoint)),
        ):
            assert all("pooler" in name for name in again.missing)
            with torch.no_grad():
                torch.testing.assert_close(again.backbone(images).patches[-1], tokens.patches[-1], **CLOSE)


def test_dinov3_of_hugging_face(tmp_path):
    """Its `base_model` is a part of it, without the patch embedding."""
    network = transformers.AutoModel.from_config(
        transformers.DINOv3ViTConfig(**SMALL, num_register_tokens=2)
    ).eval()
    network.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size=dict(height=28, width=28)).save_pretrained(tmp_path)
    images = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        tokens, expected = load_model(f"hf:{tmp_path}").backbone(images), network(images).last_hidden_state
    torch.testing.assert_close(tokens.class_token[:, -1], expected[:, 0], **CLOSE)
    torch.testing.assert_close(tokens.patches[-1], expected[:, 3:], **CLOSE)


def test_mae_of_hugging_face_masks_no_patch_and_keeps_their_order(tmp_path):
    network = transformers.ViTMAEModel(transformers.ViTMAEConfig(**SMALL)).eval()
    network.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size=dict(height=28, width=28)).save_pretrained(tmp_path)
    images = torch.randn(2, 3, 28, 28)
    network.config.mask_ratio = 0.0
    with torch.no_grad():
        expected = network(images, noise=torch.arange(16).expand(2, 16)).last_hidden_state
    for _ in range(2):
        tokens = load_model(f"hf:{tmp_path}").backbone(images)
        torch.testing.assert_close(tokens.class_token[:, -1], expected[:, 0], **CLOSE)
        torch.testing.assert_close(tokens.patches[-1], expected[:, 1:], **CLOSE)


def test_a_vit_of_timm_without_extra_tokens(tmp_path):
    sizes = dict(img_size=28, patch_size=7, embed_dim=24, depth=2, num_heads=3)
    sizes.update(class_token=False, global_pool="avg", fc_norm=False)
    network = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    timm.models.save_for_hf(network, str(tmp_path), model_args=sizes)
    images = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        tokens, expected = (
            load_model(f"timm:local-dir:{tmp_path}").backbone(images),
            network.forward_features(images),
        )
    assert (tokens.names, tokens.class_token) == (["1", "2", "output"], None)
    torch.testing.assert_close(tokens.patches[-1], expected, **CLOSE)


def test_a_processor_that_does_not_normalise_gives_values_between_0_and_1(tmp_path, picture):
    save_hugging_face("vit", tmp_path)
    processor = transformers.ViTImageProcessor(size=dict(height=28, width=28), do_normalize=False)
    processor.save_pretrained(tmp_path)
    expected = processor(Image.open(picture), return_tensors="pt")["pixel_values"]
    assert (expected.min(), expected.max()) == (0, 1)
    torch.testing.assert_close(prepared(load_model(str(tmp_path)), picture), expected, atol=0.03, rtol=0)


SQUARE, OBLONG = dict(height=28, width=28), dict(height=28, width=42)
PROCESSORS = [
    ("ViT", dict(size=OBLONG)),
    ("ViT", dict(size=SQUARE, do_rescale=False)),
    ("ViT", dict(size=SQUARE, rescale_factor=1 / 127.5)),
    ("ViT", dict(size=SQUARE, rescale_factor=1 / 127.5, do_normalize=False)),
    ("ViT", dict(size=SQUARE, image_mean=0.4, image_std=0.3, resample=0)),
    ("DeiT", dict(size=dict(height=32, width=36), crop_size=SQUARE)),
    ("Beit", dict(size=SQUARE)),
    ("Bit", dict(size=dict(shortest_edge=32), crop_size=SQUARE)),
    ("CLIP", dict(size=SQUARE, crop_size=SQUARE)),
    ("Siglip", dict(size=SQUARE)),
    ("ConvNext", dict(size=dict(shortest_edge=28))),
    ("ConvNext", dict(size=dict(shortest_edge=28), crop_pct=0.7)),
    ("ConvNext", dict(size=dict(shortest_edge=28), crop_pct=0.9)),  # 1.5 rows above the crop, which are 1
    ("ConvNext", dict(size=dict(shortest_edge=384))),  # squashed
    ("PoolFormer", dict(size=dict(shortest_edge=28), crop_size=SQUARE)),
    ("Levit", dict(size=dict(shortest_edge=28), crop_size=SQUARE)),
    ("MobileNetV2", dict(size=dict(shortest_edge=32), crop_size=SQUARE)),
]


@pytest.mark.parametrize(("kind", "options"), PROCESSORS)
def test_an_image_has_the_pixels_of_its_models_processor(tmp_path, picture, kind, options):
    save_hugging_face("vit", tmp_path)
    processor = getattr(transformers, f"{kind}ImageProcessor")(**options)
    processor.save_pretrained(tmp_path)
    (expected,) = processor(Image.open(picture), return_tensors="pt")["pixel_values"]
    (image,) = prepared(load_model(str(tmp_path)), picture)
    assert image.shape == expected.shape
    assert (image - expected).abs().mean() < 2e-3 * expected.float().std()  # it rounds otherwise


@pytest.mark.parametrize(
    ("kind", "options", "noun"),
    [
        ("ViT", dict(do_resize=False), "do_resize"),
        ("ViT", dict(do_pad=True), "do_pad"),
        ("ViT", dict(resample=5), "resample=5"),
        ("Bit", dict(do_center_crop=False), "do_center_crop"),
        ("Bit", dict(size=dict(shortest_edge=32, longest_edge=40)), "longest_edge"),
        ("Bit", dict(size=SQUARE, crop_size=OBLONG), "padded"),
        ("EfficientNet", dict(rescale_offset=True), "EfficientNetImageProcessor"),
        ("MobileViT", dict(), "MobileViTImageProcessor"),
    ],
)
def test_a_processor_that_does_something_else_is_refused(tmp_path, kind, options, noun):
    save_hugging_face("vit", tmp_path)
    getattr(transformers, f"{kind}ImageProcessor")(**options).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{noun}.* not supported"):
        load_model(f"hf:{tmp_path}")


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_features_of_weights_in_half_precision_are_computed_in_float32(tmp_path, half):
    """By name, as a checkpoint, and in a config; a checkpoint in float32 beside them keeps its bits."""
    network = save_hugging_face("dinov2", tmp_path / "whole")
    weights = network.state_dict()
    save_hugging_face("dinov2", tmp_path / "half")
    network.to(half).save_pretrained(tmp_path / "half")
    network.float()
    images = torch.randn(1, 3, 28, 28)
    with torch.no_grad():
        expected = network(images).last_hidden_state[:, 1:]
    loaded = load_model(f"hf:{tmp_path / 'half'}")
    config = loaded.config
    config["model"] = dict(type="HuggingFaceClassifier", model_name=str(tmp_path / "half"), pretrained=True)
    for checkpoint in (
        loaded,
        load_checkpoint(config, None),
        load_checkpoint(config, str(tmp_path / "half")),
    ):
        with torch.no_grad():
            features = checkpoint.backbone(images).patches[-1]
        assert features.dtype == torch.float32
        torch.testing.assert_close(features, expected, **CLOSE)
    loaded = load_model(f"hf:{tmp_path / 'half'}", str(tmp_path / "whole"))
    assert torch.equal(loaded.backbone.network.state_dict()["layernorm.weight"], weights["layernorm.weight"])


def hub_error(kind: type[Exception]) -> Exception:
    """An error of the hub without the answer that it was made from, which differs from version to version."""
    return kind.__new__(kind, "401 Client Error")


LIBRARY_ERRORS = [
    (OSError("You are trying to access a gated repo."), hub_error(GatedRepoError), "gated.*hf auth login"),
    (hub_error(GatedRepoError), None, "gated.*hf auth login"),  # timm's
    (OSError("not a local folder"), hub_error(RepositoryNotFoundError), "no such model, or a private one"),
    (OSError("We couldn't connect"), ConnectionError("[Errno 111]"), "couldn't connect"),
    (
        ModuleNotFoundError("No module named 'transformers'", name="transformers"),
        None,
        r'transformers.*pip install "mapet_mm\[hf\]"',
    ),
    (
        ModuleNotFoundError("Could not import module 'AutoModel'."),
        ImportError("libcudart.so.9: cannot open"),
        "libcudart.*repair",
    ),
    (RuntimeError("Failed to import"), ValueError("numpy.dtype size changed"), "numpy.dtype size changed"),
]


@pytest.mark.parametrize("take", [load_model, lambda name: take_start(name, Path("nowhere"), None)])
@pytest.mark.parametrize(("error", "cause", "line"), LIBRARY_ERRORS)
def test_the_real_reason_is_said_in_one_line(monkeypatch, error, cause, line, take):
    """Of `evaluate` and `--init`; the network is blamed only where it is the reason."""

    def raise_it(*_: object) -> None:
        raise error from cause

    monkeypatch.setitem(LIBRARIES, "timm", LIBRARIES["timm"]._replace(load=raise_it))
    with pytest.raises(UserError, match=line) as met:
        take("timm:vit_tiny_patch16_224")
    assert "\n" not in str(met.value)
    assert ("network" in str(met.value)) <= isinstance(cause, ConnectionError)


def test_weights_of_another_network_of_hugging_face_are_refused(tmp_path):
    for kind in ("dinov2", "registers"):
        save_hugging_face(kind, tmp_path / kind)
    with pytest.raises(UserError, match="register_tokens"):
        load_model(f"hf:{tmp_path / 'dinov2'}", str(tmp_path / "registers"))
    transformers.Dinov2Model(
        transformers.Dinov2Config(
            hidden_size=12, num_hidden_layers=1, patch_size=7, image_size=28, num_attention_heads=2
        )
    ).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="other"):
        load_model(f"hf:{tmp_path / 'dinov2'}", str(tmp_path / "other"))


def test_a_vit_of_hugging_face_converts(tmp_path):
    """A ViT's own names; the outputs are those of a MaPeTViT with its epsilon."""
    network = save_hugging_face("vit", tmp_path)
    weights = hf_to_mm(read_weights(tmp_path))
    arch = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)
    vit = MaPeTViT(arch, img_size=28, patch_size=7, out_type="raw", norm_cfg=dict(type="LN", eps=1e-12))
    vit.load_state_dict({name.removeprefix("backbone."): value for name, value in weights.items()})
    vit.eval()
    images = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(vit(images)[-1], network(images).last_hidden_state, **CLOSE)


def test_what_convert_wrote(tmp_path, capsys):
    """A file with a description; the folder of timm has the same features."""
    arch = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=96)
    vit = MaPeTViT(arch, img_size=28, patch_size=7, out_type="raw")
    vit.eval()
    weights = {f"backbone.{name}": value for name, value in vit.state_dict().items()}
    known = Description((28, 28), (0.5,) * 3, (0.25,) * 3, 32, "bicubic", 7, 3, 24, "cls_token")
    meta = dict(description=asdict(known))
    for target, name in (("mm", "vit.pth"), ("timm", "vit.safetensors"), ("timm", "folder"), ("hf", "hf")):
        write_export(tmp_path / name, target, weights, meta)
        loaded = load_model(str(tmp_path / name))
        told = capsys.readouterr().out.splitlines()[-1]
        assert "short side 32 bicubic, central 28 x 28" in told
        images = torch.randn(1, 3, 28, 28)
        with torch.no_grad():
            expected = vit(images)[-1]
            torch.testing.assert_close(loaded.backbone(images).patches[-1], expected[:, 1:], **CLOSE)
    torch.save(mm_to_timm(weights), tmp_path / "bare.pth")
    with pytest.raises(UserError, match="name its config first"):
        load_model(str(tmp_path / "bare.pth"))


class Toucher:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        Path(path).touch()

    def __reduce__(self):
        return Toucher, (self.path,)


@pytest.mark.parametrize("name", ["timm:local-dir:{}", "hf:{}", "{}/config.py"])
def test_a_folder_of_a_library_runs_nothing_that_its_file_names(tmp_path, name):
    """Not even what the process allows: MMEngine allows `getattr`, by which a file can run anything."""
    canary = tmp_path / "canary"
    network = save_timm(tmp_path) if name.startswith("timm") else save_hugging_face("vit", tmp_path)
    model = dict(type="HuggingFaceClassifier", model_name=str(tmp_path), pretrained=True)
    Config(dict(default_scope="mmpretrain", model=model, data_preprocessor={})).dump(tmp_path / "config.py")
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    weights = dict(network.state_dict(), other=Toucher(str(canary)))
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with torch.serialization.safe_globals([Toucher]):
        canary.unlink()
        with pytest.raises(UserError):
            load_model(name.format(tmp_path))
        assert not canary.exists()
        torch.load(tmp_path / "pytorch_model.bin", weights_only=True)  # the attack is a real one
    assert canary.exists()


def test_normalisation_and_size_can_be_given(tmp_path, picture, capsys):
    save_timm(tmp_path / "vit")
    given = dict(mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0), size=42)
    loaded = load_model(str(tmp_path / "vit"), **given)
    assert "short side 46 bicubic, central 42 x 42, mean (0.1, 0.2, 0.3)" in capsys.readouterr().out
    assert loaded.backbone(prepared(loaded, picture)).grid == (6, 6)
    with pytest.raises(UserError, match="--size"):
        load_model("configs/evaluation/vit-micro_frozen.py", size=42)


def test_a_normalisation_has_a_value_for_each_band(tmp_path):
    save_timm(tmp_path / "vit", in_chans=4)
    given = dict(mean=(0.1, 0.2, 0.3, 0.4), std=(0.5,) * 4)
    normalise = load_model(str(tmp_path / "vit"), **given).backbone.normalise
    images = normalise(torch.full((1, 4, 28, 28), 51.0))
    torch.testing.assert_close(images[0, :, 0, 0], torch.tensor([0.2, 0.0, -0.2, -0.4]))
    with pytest.raises(UserError, match=r"the images have 3 bands, the model's mean .* of 4"):
        normalise(torch.zeros(1, 3, 28, 28))
    with pytest.raises(UserError, match="mean of 4 bands and a standard deviation of 3"):
        load_model(str(tmp_path / "vit"), **dict(given, std=(0.5,) * 3))


def test_another_normalisation_than_the_configs(config, root):
    loaded = load_model(str(root / "config.py"), str(root / "weights.pth"), mean=(0.5,) * 3)
    assert loaded.backbone.preprocessor.mean.flatten().tolist() == [127.5] * 3


REFUSED = [
    ("nowhere", "no such config"),
    ("timm:nothing_of_this_name", "nothing_of_this_name"),
    ("hf:/nowhere/vit", "no weights are fetched"),
    ("timm:vit_tiny_patch16_224.nothing", "nothing"),
    ("timm:local-dir:/nowhere/vit", "nowhere"),
    ("nowhere.py", "nowhere.py"),
    ("mapet://vit-huge", "mapet://vit-base-kclip"),
]


@pytest.mark.parametrize(("name", "noun"), REFUSED)
def test_names_that_nothing_has_are_refused_before_any_weights_are_read(name, noun):
    with pytest.raises(UserError, match=noun):
        find_model(name)


@pytest.mark.parametrize("option", ["checkpoint", "prefix", "options", "size"])
@pytest.mark.parametrize("source", ["config", "timm", "hf", "released", "file"])
def test_what_a_source_cannot_use_is_refused(tmp_path, source, option):
    """By one line that names it; so is a checkpoint that is not there."""
    names = dict(config="configs/evaluation/vit-micro_frozen.py", released="mapet://vit-base-kclip")
    if source == "timm":
        save_timm(tmp_path / "vit")
    elif source == "hf":
        save_hugging_face("vit", tmp_path / "vit")
    elif source == "file":
        (tmp_path / "vit").touch()
    name = names.get(source, str(tmp_path / "vit"))
    torch.save({}, tmp_path / "weights.pth")
    values = dict(checkpoint=str(tmp_path / "weights.pth"), prefix="vit.", options={"a": 1}, size=42)
    flags = dict(checkpoint="CHECKPOINT", prefix="--prefix", options="--cfg-options", size="--size")
    taken = dict(config=["checkpoint", "prefix", "options"], timm=["checkpoint", "size"], file=["size"])
    taken["hf"] = taken["timm"]
    if option in taken.get(source, ()):
        find_model(name, **{option: values[option]})
    else:
        with pytest.raises(UserError, match=f"^{flags[option]}: "):
            find_model(name, **{option: values[option]})
    if option == "checkpoint" and source in taken and source != "file":
        with pytest.raises(UserError, match="no such file: nowhere"):
            find_model(name, checkpoint="nowhere.pth")


def test_a_part_of_a_run_is_refused_with_the_runs_name(tmp_path):
    (tmp_path / "run/training/vis_data").mkdir(parents=True)
    (tmp_path / "run/pretrain.py").touch()
    (tmp_path / "run/training/pretrain.py").touch()  # MMEngine's copy
    for part in ("training", "training/vis_data"):
        with pytest.raises(UserError, match=f"{part} is a part of the RUN .*run: name that"):
            load_model(str(tmp_path / "run" / part))
    (tmp_path / "run/pretrain.py").unlink()
    (tmp_path / "run/training/pretrain.py").unlink()
    with pytest.raises(UserError, match=r"without config\.json"):
        load_model(str(tmp_path / "run/training"))


@pytest.mark.parametrize("library", ["timm", "hf", "described"])
def test_random_weights_are_of_the_same_network_and_the_same_each_time(tmp_path, picture, library):
    """Whatever the weights, also those of a file; of a network that is random already there are none."""
    torch.manual_seed(1)
    if library == "timm":
        save_timm(tmp_path / "vit")
        name = f"timm:local-dir:{tmp_path / 'vit'}"
    elif library == "hf":
        save_hugging_face("dinov2", tmp_path / "vit")
        name = f"hf:{tmp_path / 'vit'}"
    else:
        vit = MaPeTViT("deit-tiny", img_size=32, patch_size=8)
        known = Description((32, 32), (0.5,) * 3, (0.5,) * 3, 32, "bicubic", 8, 3, 192, "avg_featmap")
        weights = {f"backbone.{key}": value + 0.1 for key, value in vit.state_dict().items()}
        torch.save(dict(state_dict=weights, meta={ENTRY: asdict(known)}), tmp_path / "vit.pth")
        name = str(tmp_path / "vit.pth")
    request = find_model(name)
    loaded = request.load()
    torch.manual_seed(3)
    first = random_twin(request, loaded)
    torch.manual_seed(4)
    second = random_twin(request, loaded)
    assert (first.name, first.digest) == ("random weights", second.digest)
    assert loaded.digest != first.digest
    assert random_twin(request, first) is None
    images = prepared(loaded, picture)
    layers = [one.backbone(images).pooled() for one in (loaded, first)]
    assert layers[0].shape == layers[1].shape
    assert not torch.allclose(*layers)


def test_a_mean_of_values_up_to_255_is_refused(tmp_path):
    save_timm(tmp_path)
    with pytest.raises(UserError, match=r"--mean 123.675: it is of values between 0 and 1: divide it by 255"):
        find_model(f"timm:local-dir:{tmp_path}", mean=(123.675, 116.28, 103.53))
