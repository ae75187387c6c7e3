"""`mapet-mm pretrain` on a folder of photographs, and the result in timm and Hugging Face."""

from pathlib import Path

import pytest
import timm
import torch
import transformers
from PIL import Image
from skimage import data

from mapet_mm.cli.pretrain import main as pretrain
from mapet_mm.models import MaPeTViT
from mapet_mm.weight_files import read_weights


@pytest.fixture
def photographs(tmp_path) -> Path:
    """Many formats, modes and sizes, a rotation in EXIF, and a file that is cut off."""
    folder = tmp_path / "photo graphs"
    (folder / "2020/summer").mkdir(parents=True)
    turned = Image.Exif()
    turned[0x0112] = 6
    pictures = [data.chelsea(), data.astronaut(), data.coffee(), data.rocket()]
    kinds = ["RGB jpg", "CMYK JPG", "L jpeg", "RGBA png", "P PNG", "LA png", "1 bmp", "RGB webp", "RGB tif"]
    for number, (mode, ending) in enumerate(map(str.split, 3 * kinds)):
        options = dict(exif=turned) if ending == "jpg" else {}
        size = number % 9
        picture = Image.fromarray(pictures[number % 4][: 120 + 40 * size, 30 * size :])
        place = folder / ("2020/summer" if number % 2 else "")
        picture.convert(mode).save(place / f"IMG {number}.{ending}", **options)
    whole = (folder / "IMG 0.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[:200])
    return folder


@pytest.mark.slow
def test_a_folder_of_photographs_becomes_features_in_timm_and_hugging_face(photographs, tmp_path, capfd):
    run = tmp_path / "run"
    command = [str(photographs), "--arch", "tiny", "--epochs", "2", "--workers", "0", "--batch-size", "4"]
    pretrain([*command, "--tokenizer", "random", "--out", str(run)])
    printed = capfd.readouterr().out
    assert "images: 28\n" in printed

    ours = MaPeTViT("deit-tiny", out_type="raw").eval()
    weights = read_weights(run / "training/epoch_2.pth")
    ours.load_state_dict({name: weights[f"backbone.{name}"] for name in ours.state_dict()})
    in_timm = timm.create_model(f"local-dir:{run}/timm", pretrained=True, num_classes=0).eval()
    elsewhere = transformers.AutoModel.from_pretrained(run / "huggingface").eval()
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        (tokens,) = ours(images)
        torch.testing.assert_close(in_timm.forward_features(images), tokens, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(elsewhere(images).last_hidden_state, tokens, rtol=1e-4, atol=1e-4)
    processor = transformers.AutoImageProcessor.from_pretrained(run / "huggingface")
    assert processor(Image.open(photographs / "IMG 0.jpg"))["pixel_values"][0].shape == (3, 224, 224)

    pretrain([*command, "--tokenizer", "random", "--out", str(run)])
    printed = capfd.readouterr().out
    assert printed.startswith("going on with")
    assert printed.count("done in") == 6
    assert "nothing to do" in printed
    assert len(list((run / "training").glob("epoch_*.pth"))) == 2

    command[command.index("--epochs") + 1] = "3"
    pretrain([*command, "--tokenizer", "random", "--out", str(run)])
    printed = capfd.readouterr()
    assert "epochs: 2, now 3: the training goes on" in printed.out
    assert "training/epoch_2.pth; `param_scheduler`, `train_cfg` differ" in printed.err
    assert "nothing to do" in printed.out
    assert not torch.equal(
        timm.create_model(f"local-dir:{run}/timm", pretrained=True, num_classes=0).pos_embed,
        in_timm.pos_embed,
    )
