"""`mapet_mm.pretrain`, `finetune`, `evaluate` and `load`: the commands as functions."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from skimage import data as photographs

import mapet_mm
from mapet_mm.cli import finetune
from mapet_mm.utils.errors import UserError


@pytest.fixture
def started(monkeypatch) -> list:
    """The options of the jobs that were started."""
    jobs: list = []
    monkeypatch.setattr("mapet_mm.cli.pretrain.pretrain", jobs.append)
    return jobs


def test_options_are_those_of_the_command(started, tmp_path):
    run = mapet_mm.pretrain(
        tmp_path, tmp_path / "run", init="timm:a.b", epochs=3, batch_size=8, no_verdict=True, arch=None
    )
    (args,) = started
    assert (args.images, args.out, args.init, args.epochs) == (tmp_path, tmp_path / "run", "timm:a.b", 3)
    assert (args.batch_size, args.no_verdict, args.arch, args.retry_skipped) == (8, True, None, False)
    assert run.folder == tmp_path / "run"
    assert run.verdict is None
    assert len(started) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(epochs=0), "--epochs must be 1 or more, not 0"),
        (dict(epochs=2.5), "--epochs must be 1 or more, not 2.5"),
        (dict(arch="huge"), "--arch must be tiny, small or base, not 'huge'"),
        (dict(no_verdict="yes"), "--no-verdict must be True or False, not 'yes'"),
        (dict(length=3), "pretrain has no length=: its options are images, out, arch, "),
    ],
)
def test_options_that_the_command_refuses_are_refused_in_python(started, tmp_path, options, said):
    with pytest.raises(UserError, match=re.escape(said)):
        mapet_mm.pretrain(tmp_path, tmp_path / "run", **options)
    assert not started


def test_a_fine_tuning_is_that_of_the_command_and_its_table_comes_back(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("mapet_mm.cli.finetune.finetune", started.append)
    (tmp_path / "result.json").write_text('{"sentence": "No gain seen."}')
    worth = mapet_mm.finetune("run", tmp_path, masks=("i", "m"), ignore=(255, 11), groups=1, no_compare=True)
    assert worth == dict(sentence="No gain seen.")
    words = ["run", "--out", str(tmp_path), "--masks", "i", "m", "--ignore", "255,11", "--groups", "1"]
    assert started == [finetune.parse_args([*words, "--no-compare"])]
    with pytest.raises(UserError, match=r"--epochs must be 1 or more, not 0"):
        mapet_mm.finetune("run", tmp_path, images="i", epochs=0)
    with pytest.raises(
        UserError, match=r"finetune has no length=: its options are run, out, images, masks, "
    ):
        mapet_mm.finetune("run", tmp_path, images="i", length=3)
    assert len(started) == 1


@pytest.fixture
def vit(tmp_path) -> Path:
    """A folder that timm reads: a small ViT with random weights."""
    options = dict(embed_dim=24, depth=2, num_heads=3, img_size=32, num_classes=0)
    model = timm.create_model("vit_tiny_patch16_224", **options)
    known = dict(input_size=(3, 32, 32), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), crop_pct=0.9)
    model.pretrained_cfg.update(known, url="", num_classes=0)
    timm.models.save_for_hf(model, tmp_path / "timm", model_args=options)
    return tmp_path / "timm"


def test_a_loaded_backbone_takes_images_as_its_library_does(vit, tmp_path):
    Image.fromarray(photographs.chelsea()).save(tmp_path / "cat.png")
    model, transform = mapet_mm.load(vit.parent)  # a RUN
    own = timm.create_model(f"local-dir:{vit}", pretrained=True).eval()
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(own))
    expected = prepare(Image.open(tmp_path / "cat.png"))
    torch.testing.assert_close(transform(tmp_path / "cat.png"), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(transform(Image.open(tmp_path / "cat.png")), expected, atol=1e-5, rtol=0)
    assert not model.training
    with torch.no_grad():
        torch.testing.assert_close(model(expected[None]), own(expected[None]))


def test_an_export_older_than_the_training_that_goes_on_is_said(vit, capsys):
    """Not of a finished RUN, whose copy may have any times."""
    run = vit.parent
    (run / "pretrain.py").write_text("work_dir = 'training'\ntrain_cfg = dict(max_epochs=30)\n")
    (run / "training").mkdir()
    (run / "training/epoch_20.pth").touch()
    os.utime(vit, (1, 1))
    mapet_mm.load(run)
    told = capsys.readouterr().out
    assert "timm's export, made before epoch_20.pth" in told
    assert str(run / "training/epoch_20.pth") in told
    (run / "training/epoch_30.pth").touch()
    mapet_mm.load(run)
    assert "epoch_" not in capsys.readouterr().out


def saved(path: Path, pixels: np.ndarray, mode: str | None = None, **options) -> Path:
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


def test_a_pil_image_is_decoded_as_its_file(vit, tmp_path):
    """Whatever its orientation in EXIF and its mode."""
    colour = photographs.chelsea()[:, :200]
    grey = colour[..., 0]
    turned = Image.Exif()
    turned[0x0112] = 6
    files = [
        saved(tmp_path / "turned.jpg", colour, exif=turned),
        saved(tmp_path / "turned.png", colour, exif=turned),
        saved(tmp_path / "palette.png", colour, "P"),
        saved(tmp_path / "alpha.png", np.dstack([colour, grey])),
        saved(tmp_path / "grey alpha.png", grey, "LA"),
    ]
    _, transform = mapet_mm.load(vit.parent)
    for file in files:
        expected = transform(file)
        assert expected.std() > 0.1
        torch.testing.assert_close(transform(Image.open(file)), expected, atol=1e-6, rtol=0)
    cmyk = saved(tmp_path / "cmyk.jpg", colour, "CMYK", quality=95)
    assert (transform(Image.open(cmyk)) - transform(cmyk)).abs().mean() < 0.02  # other rounding


def test_images_and_folders_that_are_missing_or_broken_are_named(vit, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    _, transform = mapet_mm.load(vit.parent)
    for name in ("broken.jpg", "missing.jpg"):
        with pytest.raises(UserError, match=rf"image `{tmp_path / name}` cannot be read"):
            transform(tmp_path / name)
    with pytest.raises(UserError, match=rf"no folder of images, or config of image sets, `{tmp_path}/gone`"):
        mapet_mm.evaluate(f"timm:local-dir:{vit}", tmp_path / "gone")


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_images_of_more_than_8_bits_are_refused_from_files_and_from_pil(vit, tmp_path, kind):
    _, transform = mapet_mm.load(vit.parent)
    image = Image.fromarray(np.array([[0, 3000]], kind))
    with pytest.raises(UserError, match="--range LOW HIGH"):
        transform(image)
    _, mapping = mapet_mm.load(vit.parent, pictures=dict(range=(0, 3000)))
    assert mapping(image)[:, :, 0].max() < mapping(image)[:, :, -1].min()
    image.save(tmp_path / "deep.tif")
    torch.testing.assert_close(mapping(tmp_path / "deep.tif"), mapping(image))
    with pytest.raises(UserError, match=r"deep\.tif`: values of (16 bits|int32|float32).*--range LOW HIGH"):
        transform(tmp_path / "deep.tif")
    if kind == np.uint16:
        (tmp_path / "deep.pgm").write_bytes(b"P5 2 1 3000\n" + np.array([[0, 3000]], ">u2").tobytes())
        torch.testing.assert_close(mapping(tmp_path / "deep.pgm"), mapping(image))
        with pytest.raises(UserError, match="Pillow has stretched"):
            mapping(Image.open(tmp_path / "deep.pgm"))


def test_four_bands_keep_their_order_and_values(tmp_path):
    """The fourth is no alpha, which would blacken the others where it is 0."""
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "four.tif", np.full((250, 300, 4), [100, 200, 300, 0], np.uint16))
    options = dict(in_chans=4, embed_dim=48, depth=1, num_heads=3)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **options)
    model.pretrained_cfg.update(input_size=(4, 224, 224), mean=(0.1, 0.2, 0.3, 0.4), std=(0.5,) * 4, url="")
    timm.models.save_for_hf(model, tmp_path / "timm", model_args=options)
    pictures = dict(range=(0, 500), bands=(1, 2, 3, 4))
    _, transform = mapet_mm.load(f"timm:local-dir:{tmp_path}/timm", pictures=pictures)
    bands = transform(tmp_path / "four.tif")
    assert bands.shape == (4, 224, 224)
    expected = torch.tensor([0.2 - 0.1, 0.4 - 0.2, 0.6 - 0.3, 0 - 0.4]) / 0.5
    torch.testing.assert_close(bands, expected[:, None, None].expand_as(bands), atol=1e-5, rtol=0)


def test_figures_come_as_rows_and_as_a_frame(vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for index in range(40):
        path = tmp_path / "images" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (32, 32, 3)) // (1 + 3 * (index % 2))
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    rows = mapet_mm.evaluate(f"timm:local-dir:{vit}", "images", ["NearestNeighbours"])
    assert {row.protocol for row in rows} == {"k-NN"}
    assert max(row.value for row in rows) == 100  # the classes differ in brightness
    pandas = pytest.importorskip("pandas")
    assert isinstance(rows.frame, pandas.DataFrame)
    assert rows.frame["value"].tolist() == [row.value for row in rows]
