"""What `mapet-mm pretrain` decides by itself, and what it refuses."""

import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from config_building import run_tool
from mmengine.config import Config
from PIL import Image
from timm.data.constants import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from mapet_mm.cli import choices, token_choices
from mapet_mm.cli.choices import choose
from mapet_mm.cli.configs import pretraining_config, tokenizer_config
from mapet_mm.cli.options import PretrainOptions
from mapet_mm.cli.pretrain import parse_args, pretrain
from mapet_mm.cli.run_report import method_words
from mapet_mm.cli.stages import Stage, claim
from mapet_mm.cli.starts import Start, take_start
from mapet_mm.cli.token_choices import init_tokens, random_tokens, vocabulary
from mapet_mm.datasets import StoredImages
from mapet_mm.interop.model_card import command_of
from mapet_mm.models import MaPeTPretrainViT
from mapet_mm.models.target_generators.tokenizer import TokenizerError
from mapet_mm.registry import DATASETS, MODELS
from mapet_mm.structures import TokenStore
from mapet_mm.structures.names import read_lines
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.run_folder import HELD_OUT, IMAGES, Run
from mapet_mm.weight_files import read_weights


@pytest.fixture
def photographs(tmp_path) -> Path:
    for number, name in enumerate(("a.jpg", "deep/er/b.PNG", "deep/c d.webp")):
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30 + number, 40)).save(path)
    (tmp_path / "mine/notes.txt").write_text("no image")
    return tmp_path / "mine"


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    def weights_file(*_, **__):
        raise TokenizerError("could not download")

    monkeypatch.setattr(token_choices, "weights_file", weights_file)


@pytest.fixture
def planned(monkeypatch) -> list[list[Stage]]:
    """The stages of each `pretrain`, which are not run."""
    plans: list[list[Stage]] = []
    monkeypatch.setattr("mapet_mm.cli.pretrain.run_stages", lambda stages, *_: plans.append(stages))
    return plans


def options(photographs: Path, *more: str) -> PretrainOptions:
    args = parse_args([str(photographs), "--out", str(photographs.parent / "run"), *more])
    args.out.mkdir(exist_ok=True)
    return args


@pytest.mark.parametrize(
    ("images", "epochs", "expected"),
    [
        (1_281_167, None, (4, 8192, 20, 5)),
        (100_000, 300, (4, 8192, 20, 5)),
        (10_000, 300, (32, 8192, 20, 5)),
        (300, 300, (134, 1024, 20, 5)),
        (8, 300, (156, 32, 20, 5)),
        (1, 1, (156, 4, 20, 5)),
        (6_000, 100, (54, 8192, 20, 2)),
        (6_000, 20, (54, 8192, 10, 1)),
        (6_000, 5, (27, 4096, 10, 1)),
    ],
)
def test_the_vocabulary_is_what_the_images_and_the_training_can_carry(images, epochs, expected):
    """39 rows a centroid, as faiss advises, of at most all 196 places of an image, up to the paper's k.

    Few epochs get fewer starts and iterations, then fewer centroids.
    """
    assert vocabulary(images, epochs=epochs) == expected


def test_images_of_all_kinds_are_found_in_all_folders_as_the_dataset_finds_them(photographs, tmp_path):
    (photographs / "._a.jpg").write_bytes(b"what macOS leaves beside a.jpg")
    (tmp_path / "linked").symlink_to(photographs)
    (photographs / ".thumbnails").mkdir()
    (photographs / ".thumbnails/a.jpg").write_bytes(b"what a viewer leaves")
    (photographs / "a.heic").write_bytes(b"")
    for name in (b"gr\xfcn.jpg", b"two\nlines.jpg"):  # Latin-1, as an old archive unpacks
        Path(os.fsdecode(os.path.join(os.fsencode(photographs), name))).write_bytes(b"")
    chosen = choose(options(tmp_path / "linked"))
    others = "other files, left out: 1 .heic, 1 .txt, 2 with a line break or no UTF-8 in their names"
    assert chosen.words[:2] == ["images: 3", others]
    assert len(chosen.labels.names) == 3


def test_folders_for_tests_are_trained_on_and_a_line_says_so(photographs, tmp_path):
    for part in ("train", "Test"):
        (tmp_path / part).symlink_to(photographs)
    words = choose(options(tmp_path)).words
    assert any(line.startswith("folders `Test`: their images are trained on, too") for line in words)
    assert not any("trained on, too" in line for line in choose(options(photographs)).words)


def test_without_clip_weights_the_network_is_a_random_one_and_a_line_says_so(photographs, capsys):
    chosen = choose(options(photographs, "--arch", "tiny"))
    assert "no CLIP weights: could not download" in capsys.readouterr().out
    assert chosen.tokens.config["pretrained"] == dict(type="random", seed=0)
    assert any(
        "tokens: clusters of a random network's features, which know colours" in word for word in chosen.words
    )
    with pytest.raises(TokenizerError, match="could not download"):
        token_choices.choose_tokens("clip", None)


@pytest.mark.parametrize(
    ("has_clip", "has_init", "tokenizer"),
    [
        (True, True, "clusters of the features of --init"),
        (False, True, "clusters of the features of --init"),
        (True, False, "k-CLIP of RN50"),
        (False, False, "clusters of a random network's features"),
    ],
)
def test_the_tokenizer_is_the_starts_or_else_clip_or_else_random(
    photographs, monkeypatch, has_clip, has_init, tokenizer
):
    weights = photographs.parent / "deit.pth"
    torch.save(deit().state_dict(), weights)
    if has_clip:
        monkeypatch.setattr(token_choices, "weights_file", lambda *_: "RN50.pt")
    chosen = choose(options(photographs, *(["--init", str(weights)] if has_init else [])))
    assert chosen.tokens.words.startswith(tokenizer)


def test_deep_images_are_refused_without_a_range_and_read_by_it_in_both_configs(tmp_path):
    folder = tmp_path / "thermal"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(4):
        values = random.integers(29_000, 30_001, (40, 40)).astype(np.uint16)
        values[0, :2] = 29_000, 30_000
        Image.fromarray(values).save(folder / f"{number}.png")
    with pytest.raises(UserError, match=r"16 bits.*--range LOW HIGH.*go from 29,000 to 30,000 in 4"):
        choose(options(folder))
    for given, pair in (["29000", "30000"], (29_000, 30_000)), (["0%", "100%"], (29_000, 30_000)):
        args = options(folder, "--range", *given, "--tokenizer", "random", "--epochs", "2")
        chosen = choose(args)
        load = dict(type="mapet_mm.LoadPicture", range=pair)
        assert "29,000 to 30,000 become 0 to 255, 0.0% are beyond" in " ".join(chosen.words)
        assert tokenizer_config(args, chosen).dataset[0].pipeline[0] == load
        assert pretraining_config(args, chosen).train_dataloader.dataset.square[0] == load
    assert PretrainOptions(images=folder, out=folder, range=((0, 1), (2, 3.5))).value_range == (
        (0, 1),
        (2, 3.5),
    )
    assert PretrainOptions(images=folder, out=folder, range=("1%", "99%")).value_range == ("1%", "99%")


@pytest.fixture
def bands(tmp_path) -> Path:
    """Pictures of 16 bits in four bands, and photographs of the same scenes under the same names."""
    tifffile = pytest.importorskip("tifffile")
    random = np.random.default_rng(0)
    for folder in ("bands", "rgb"):
        (tmp_path / folder).mkdir()
    for number in range(4):
        values = random.integers(0, 4096, (40, 40, 4)).astype(np.uint16)
        tifffile.imwrite(tmp_path / f"bands/{number}.tif", values, photometric="rgb")
        Image.fromarray((values[..., :3] // 16).astype(np.uint8)).save(tmp_path / f"rgb/{number}.tif")
    return tmp_path / "bands"


FOUR = ["--range", "0", "4095", "--bands", "1", "2", "3", "4", "--tokenizer", "random", "--epochs", "2"]


def test_four_bands_get_a_network_of_four_and_tokens_of_three(bands):
    with pytest.raises(UserError, match=r"4 bands.*--bands 1 2 3 4"):
        choose(options(bands, "--range", "0", "4095"))
    args = options(bands, *FOUR)
    chosen = choose(args)
    assert "tokenizer: bands 1 2 3 as red, green and blue (others: --teacher-bands)" in chosen.words
    training = pretraining_config(args, chosen)
    assert training.model.backbone.in_channels == 4
    assert not training.data_preprocessor.to_rgb
    assert [round(value / 128) for value in training.data_preprocessor.mean] == [1] * 4
    assert training.data_preprocessor.color_jitter == dict(brightness=0.4, contrast=0.4)
    dataset = training.train_dataloader.dataset
    assert dataset.square[0] == dict(type="mapet_mm.LoadPicture", range=(0, 4095), bands=(1, 2, 3, 4))
    assert dataset.square[1].type == "mapet_mm.EachBand"
    assert [step.type for step in dataset.pipeline] == ["PackInputs"]
    tokenizer = tokenizer_config(args, chosen)
    assert tokenizer.dataset[0].pipeline[0].bands == [1, 2, 3]
    other = options(bands, *FOUR, "--teacher-bands", "4", "3", "2")
    assert tokenizer_config(other, choose(other)).dataset[0].pipeline[0].bands == [4, 3, 2]


def test_the_teacher_may_see_other_pictures_which_must_stay(bands, planned, capsys):
    """The same names in another folder; a missing or replaced one is refused."""
    rgb = bands.with_name("rgb")
    run = bands.with_name("run")
    command = [str(bands), "--out", str(run), *FOUR, "--teacher-images", str(rgb)]
    pretrain(parse_args(command))
    tokenizer = Config.fromfile(run / "tokenizer.py")
    assert tokenizer.dataset[0].data_prefix == tokenizer.data_root == str(rgb)
    assert tokenizer.dataset[0].pipeline[0].type == "LoadImageFromFile"
    assert Config.fromfile(run / "pretrain.py").train_dataloader.dataset.data_root == str(bands)
    pretrain(parse_args(command))
    (rgb / "0.tif").rename(rgb / "kept.tif")
    with pytest.raises(UserError, match=r"1 images of run .* missing or have changed .* 0\.tif"):
        pretrain(parse_args(command))
    (rgb / "1.tif").rename(rgb / "0.tif")
    (rgb / "kept.tif").rename(rgb / "1.tif")
    with pytest.raises(UserError, match=r"2 images of run .* missing or have changed"):
        pretrain(parse_args(command))
    (rgb / "1.tif").unlink()
    with pytest.raises(UserError, match=r"lacks 1 of the 4 images, such as 1\.tif"):
        choose(parse_args([*command, "--out", str(bands.with_name("other"))]))
    with pytest.raises(SystemExit):
        parse_args([*command, "--teacher-bands", "1", "2", "3"])


@pytest.mark.parametrize("given", ["0 1 2", "1% 2", "1% 2% 3% 4%", "a b", "101% 3%"])
def test_a_range_that_is_none_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        parse_args(["photos", "--out", "run", "--range", *given.split()])
    assert "--range" in capsys.readouterr().err


def test_vit_grid_and_tokens_follow_the_size_of_images_and_patches(photographs):
    args = options(
        photographs, "--image-size", "32", "--patch-size", "4", "--tokenizer", "random", "--epochs", "2"
    )
    chosen = choose(args)
    training = pretraining_config(args, chosen)
    backbone = training.model.backbone
    assert (backbone.img_size, backbone.patch_size, backbone.cutting_point) == (32, 4, 17)  # 16 of 64 seen
    assert training.train_dataloader.dataset.square[1].scale == 32
    tokens = tokenizer_config(args, chosen)
    assert tokens.tokenizer.clip_model.image_size == 128  # 8 x 8 positions of 16 pixels
    with pytest.raises(UserError, match="no multiple"):
        choose(options(photographs, "--image-size", "40"))


def test_a_start_takes_the_size_that_is_asked_for(photographs):
    torch.save(deit().state_dict(), photographs.parent / "deit.pth")
    chosen = choose(
        options(photographs, "--init", str(photographs.parent / "deit.pth"), "--image-size", "64")
    )
    assert (chosen.side, chosen.grid) == (64, 4)
    assert chosen.tokens.config["encoder"]["img_size"] == 64


def test_clip_is_asked_for_beside_a_start(photographs, monkeypatch):
    torch.save(deit().state_dict(), photographs.parent / "deit.pth")
    monkeypatch.setattr(token_choices, "weights_file", lambda *_: "RN50.pt")
    chosen = choose(
        options(photographs, "--init", str(photographs.parent / "deit.pth"), "--tokenizer", "clip")
    )
    assert chosen.tokens.words.startswith("k-CLIP of RN50")


def test_the_starts_tokens_cluster_the_features_of_its_weights(tmp_path):
    model = deit().eval()
    torch.save(model.state_dict(), tmp_path / "deit.pth")
    take_start(str(tmp_path / "deit.pth"), tmp_path, None)
    config = init_tokens(Start([], arch="tiny")).config
    config["encoder"]["init_cfg"]["checkpoint"] = str(tmp_path / "init.pth")
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        patches = model.forward_features(images)[:, 1:]
    torch.testing.assert_close(MODELS.build(config).features(images), patches, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "published"),
    [
        (random_tokens(), (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)),
        (init_tokens(Start([], arch="tiny")), (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)),
    ],
    ids=["CLIP", "start"],
)
def test_images_of_a_tokenizer_are_normalised_by_its_networks_numbers(tokens, published):
    assert np.allclose(np.divide(tokens.statistics, 255), published, atol=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        ["--class-level", "none", "--seed", "3", "--lr", "0.001"],
        ["--no-verdict", "--method", "visible-mim"],
    ],
)
def test_the_command_that_a_run_shows_is_the_one_that_made_it(photographs, planned, words):
    pretrain(options(photographs, "--arch", "tiny", *words))
    run = photographs.parent / "run"
    command = shlex.split(command_of(Run(run), full_paths=True))
    kept = json.loads((run / "identity.json").read_text())
    del kept["files"]
    assert parse_args([*command[2:], "--workers", "3"]).recorded() == kept


def test_other_options_for_the_same_folder_are_refused(photographs, planned, monkeypatch):
    monkeypatch.chdir(photographs.parent)
    pretrain(parse_args(["mine", "--out", "run", "--epochs", "5"]))
    pretrain(options(photographs, "--epochs", "5", "--workers", "0"))  # the same folder; decides nothing
    with pytest.raises(UserError, match="epochs: 5, now 4"):
        pretrain(options(photographs, "--epochs", "4"))


def test_more_epochs_lengthen_the_training_and_its_schedule(photographs, planned, capsys):
    pretrain(options(photographs, "--epochs", "1"))
    for epochs, words in ((60, ["--epochs", "60"]), (60, []), (90, ["--epochs", "90"])):
        pretrain(options(photographs, *words))
        cfg = Config.fromfile(photographs.parent / "run/pretrain.py")
        assert (cfg.train_cfg.max_epochs, cfg.param_scheduler[-1].end, cfg.resume) == (epochs, epochs, True)
        assert f"{photographs.parent}/run/training/epoch_{epochs}.pth" in planned[-1][-1].shown
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epochs: ")]
    where = "the training goes on from its last checkpoint, at the learning rate that"
    assert said == [
        f"epochs: {before}, now {now}: {where} {now} epochs have there" for before, now in ((1, 60), (60, 90))
    ]


def test_other_processes_share_the_images_of_a_step(photographs, planned, capsys):
    """Also of a step that the user has changed; the rate is for as many images."""
    config = photographs.parent / "run/pretrain.py"

    def batch_size(processes: int) -> int:
        pretrain(options(photographs, "--batch-size", "8", "--processes", str(processes)))
        return Config.fromfile(config).train_dataloader.batch_size

    assert (batch_size(2), batch_size(2)) == (8, 8)
    assert not Config.fromfile(config).get("resume")
    capsys.readouterr()
    assert batch_size(4) == 4
    assert "processes: 2, now 4, with 4 images each, 16 a step as before" in capsys.readouterr().out
    assert Config.fromfile(config).resume
    assert (batch_size(4), batch_size(1)) == (4, 16)
    num_started = len(planned)
    with pytest.raises(UserError, match=r"16 images a step, which 3 processes .* --processes 2"):
        batch_size(3)
    assert len(planned) == num_started
    config.write_text(config.read_text().replace("batch_size=16,", "batch_size=6,"))
    assert (batch_size(1), batch_size(2)) == (6, 3)


def test_options_that_decided_nothing_bind_to_nothing(photographs, planned):
    (photographs.parent / "empty").mkdir()
    for wrong, said in (
        (options(photographs, "--init", "nowhere.pth", "--tokenizer", "init"), "nowhere.pth"),
        (options(photographs.parent / "empty"), "holds no images"),
        (options(photographs.parent / "gone"), "is not a folder"),
        (options(photographs, "--labels", "nowhere.txt"), "--labels nowhere.txt: FileNotFoundError"),
        (options(photographs, "--labels", str(photographs / "a.jpg")), "a text of lines `name class`"),
    ):
        with pytest.raises(UserError, match=said):
            pretrain(wrong)
    pretrain(options(photographs, "--tokenizer", "random"))
    assert len(planned) == 1


def test_a_file_of_labels_is_the_same_by_any_name(photographs, planned, monkeypatch):
    labels = photographs.parent / "labels.txt"
    labels.write_text("a.jpg x\ndeep/er/b.PNG y\ndeep/c d.webp\tx\n")
    identity = photographs.parent / "run/identity.json"
    monkeypatch.chdir(photographs)
    pretrain(options(photographs, "--labels", "../labels.txt"))
    whole = identity.read_text()
    monkeypatch.chdir(photographs.parent)
    pretrain(options(photographs, "--labels", "labels.txt"))
    assert identity.read_text() == whole
    with pytest.raises(UserError, match=r"labels: .*/labels.txt, now .*/others.txt"):
        pretrain(options(photographs, "--labels", "others.txt"))


def test_a_file_of_groups_is_the_same_by_its_content(photographs, planned, monkeypatch):
    groups = photographs.parent / "groups.txt"
    groups.write_text("a.jpg x\ndeep/er/b.PNG y\ndeep/c d.webp\tx\n")
    pretrain(options(photographs, "--groups", str(groups)))
    pretrain(options(photographs, "--groups", str(groups.rename(photographs.parent / "moved.txt"))))
    with pytest.raises(UserError, match="groups: "):
        pretrain(options(photographs, "--groups", "1"))
    assert len(planned) == 2
    assert PretrainOptions(images="a", out="b", groups=1).groups == "1"
    with pytest.raises(UserError, match="--groups must be a level of folders"):
        PretrainOptions(images="a", out="b", groups=0)


def test_images_and_labels_are_the_same_wherever_they_lie(photographs, planned, capsys):
    labels = photographs.parent / "labels.txt"
    labels.write_text("a.jpg x\ndeep/er/b.PNG y\ndeep/c d.webp\tx\n")
    run = photographs.parent / "run"
    pretrain(options(photographs, "--labels", str(labels)))
    moved = photographs.rename(photographs.parent / "their photographs")
    Image.new("RGB", (30, 40)).save(moved / "new.png")
    capsys.readouterr()
    pretrain(options(moved, "--labels", str(labels.rename(photographs.parent / "classes.txt"))))
    printed = capsys.readouterr().out
    assert f"images: in {photographs} before, now in {moved}\n" in printed
    assert "images: 1 are new and left out" in printed
    tokenizer = Config.fromfile(run / "tokenizer.py")
    assert tokenizer.data_root == tokenizer.codebook.dataset.data_prefix == str(moved)
    pretraining = Config.fromfile(run / "pretrain.py")
    assert pretraining.resume is True
    assert str(photographs) not in tokenizer.pretty_text + pretraining.pretty_text
    # Back again, beside a link that leads there now: nothing is left to write.
    moved.rename(photographs)
    moved.symlink_to(photographs)
    pretrain(options(photographs, "--labels", str(photographs.parent / "classes.txt")))
    assert "images: in" not in capsys.readouterr().out


def test_other_images_or_labels_under_the_same_names_are_refused(photographs, planned):
    labels = photographs.parent / "labels.txt"
    labels.write_text("a.jpg x\ndeep/er/b.PNG y\ndeep/c d.webp\tx\n")
    pretrain(options(photographs, "--labels", str(labels)))
    labels.write_text(labels.read_text().replace("y", "x").replace("a.jpg x", "a.jpg y"))
    with pytest.raises(UserError, match=r"labels.txt: run .* was made with other lines; take another"):
        pretrain(options(photographs, "--labels", str(labels)))
    other = photographs.rename(photographs.parent / "other")
    (other / "deep/er/b.PNG").rename(photographs.parent / "b.PNG")
    with pytest.raises(UserError, match=r"other lacks 1 of the 3 images of run .*, such as deep/er/b.PNG"):
        pretrain(options(other, "--labels", str(labels)))
    Image.new("RGB", (9, 9)).save(other / "deep/er/b.PNG")
    with pytest.raises(UserError, match=r"run `.*run` was made of another image `deep/er/b.PNG`"):
        pretrain(options(other, "--labels", str(labels)))


def test_a_run_from_before_there_were_digests_goes_by_the_path(photographs, planned):
    run = photographs.parent / "run"
    pretrain(options(photographs))
    identity = json.loads((run / "identity.json").read_text())
    del identity["files"]
    (run / "identity.json").write_text(json.dumps(identity))
    pretrain(options(photographs))
    assert json.loads((run / "identity.json").read_text()) == identity
    with pytest.raises(UserError, match=r"images: .*mine, now .*moved"):
        pretrain(options(photographs.rename(photographs.parent / "moved")))


def test_a_folder_has_one_process_at_work(photographs, planned):
    args = options(photographs)
    with claim(args.out, "pretrain"), pytest.raises(UserError, match="is at work"):
        pretrain(args)
    pretrain(args)


def test_a_folder_is_free_after_an_error_that_is_kept(photographs, monkeypatch):
    """As a notebook keeps the last one, with the variables of its functions."""

    def failing(*_):
        raise UserError("a stage failed")

    monkeypatch.setattr("mapet_mm.cli.pretrain.run_stages", failing)
    kept = []
    for _ in range(2):
        with pytest.raises(UserError, match="a stage failed") as error:
            pretrain(options(photographs))
        kept.append(error)


def test_what_was_decided_stays_and_nothing_else_is_said(photographs, planned, monkeypatch, capsys):
    """CLIP's weights appear, an image is added, and the weights to start from have gone."""
    torch.save(deit().state_dict(), photographs.parent / "deit.pth")
    args = options(photographs, "--init", str(photographs.parent / "deit.pth"))
    pretrain(args)
    assert "start: " in capsys.readouterr().out
    run = photographs.parent / "run"
    made = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    monkeypatch.setattr(token_choices, "weights_file", lambda *_: "RN50.pt")
    (photographs.parent / "deit.pth").unlink()
    (photographs / "more.png").write_bytes((photographs / "a.jpg").read_bytes())
    pretrain(args)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"going on with {run}/tokenizer.py and {run}/pretrain.py"
    assert printed[1] == "images: 1 are new and left out (another --out trains with them)"
    assert printed[2].startswith("the following commands run in")
    assert printed[3].startswith("next: ")
    assert len(printed) == 8
    assert {path: path.stat().st_mtime_ns for path in run.iterdir()} == made


def deit(**arguments: object) -> torch.nn.Module:
    return timm.create_model("deit_tiny_patch16_224", **arguments)


def test_weights_to_start_from_become_the_backbones(tmp_path):
    model = deit()
    torch.save({"model": model.state_dict()}, tmp_path / "deit.pth")
    start = take_start(str(tmp_path / "deit.pth"), tmp_path, None)
    assert (start.arch, start.grid) == ("tiny", 14)
    assert start.words == [f"start: {tmp_path}/deit.pth, names of timm, without head"]
    weights = read_weights(tmp_path / "init.pth")
    assert torch.equal(weights["backbone.layers.0.attn.qkv.weight"], model.blocks[0].attn.qkv.weight)
    assert torch.equal(weights["backbone.layers.0.attn.gamma1.weight"], torch.ones(192))
    vit = MaPeTPretrainViT(
        dict(embed_dims=192, num_layers=12, num_heads=3, feedforward_channels=768), cutting_point=50
    )
    own = {name.removeprefix("backbone."): value for name, value in weights.items()}
    missing, unexpected = vit.load_state_dict(own, strict=False)
    assert (missing, unexpected) == ([], [])


@pytest.mark.parametrize("prefix", ["_orig_mod.model.", "module.backbone.", "ema.", "teacher.backbone."])
def test_a_start_is_found_behind_one_prefix(tmp_path, prefix):
    """Of wrappers, averages, and trainings of other libraries; of two networks none is guessed."""
    weights = deit(num_classes=0).state_dict()
    behind = {prefix + name: value for name, value in weights.items()}
    torch.save(dict(behind, **{"dino_head.mlp.0.weight": torch.ones(3)}), tmp_path / "start.pth")
    start = take_start(str(tmp_path / "start.pth"), tmp_path, None)
    assert start.words[0].endswith("start.pth, names of timm, without dino_head")
    found = read_weights(tmp_path / "init.pth")
    assert torch.equal(found["backbone.layers.3.attn.qkv.weight"], weights["blocks.3.attn.qkv.weight"])
    if prefix.startswith("teacher"):
        student = {f"student.{name}": value for name, value in weights.items()}
        torch.save({**behind, **student}, tmp_path / "start.pth")
        with pytest.raises(UserError, match=r"under `student\.`, `teacher\.backbone\.`"):
            take_start(str(tmp_path / "start.pth"), tmp_path, None)


OTHER_WEIGHTS = [
    (lambda: deit().state_dict() | dict(reg_token=torch.zeros(1, 4, 192)), "tiny", "reg_token"),
    (lambda: deit().state_dict(), "base", "'embed_dims': 192"),
    (lambda: deit(depth=6).state_dict(), None, "'num_layers': 6"),
    (lambda: deit(class_token=False, global_pool="avg").state_dict(), "tiny", "class token"),
    (lambda: deit(global_pool="avg", fc_norm=True).state_dict(), None, "without a final norm"),
    (lambda: deit().state_dict() | {"norm.bias": torch.full((192,), torch.nan)}, None, "are not finite"),
    # DINOv2's own file, whose weights timm and Hugging Face have by name.
    (lambda: deit(patch_size=14, init_values=1.0).state_dict(), None, "14; .*hf:facebook/dinov2-small"),
]


@pytest.mark.parametrize(("weights", "arch", "noun"), OTHER_WEIGHTS, ids=[row[2] for row in OTHER_WEIGHTS])
def test_weights_that_would_leave_parts_random_or_out_are_refused(tmp_path, weights, arch, noun):
    torch.save(weights(), tmp_path / "other.pth")
    with pytest.raises(UserError, match=noun):
        take_start(str(tmp_path / "other.pth"), tmp_path, arch)
    assert not (tmp_path / "init.pth").exists()


@pytest.mark.parametrize("arch", ["tiny", "small", "base"])
def test_the_configs_are_ordinary_ones_with_paths_inside_the_folder(photographs, arch, planned):
    pretrain(options(photographs, "--arch", arch, "--epochs", "60", "--seed", "7", "--workers", "2"))
    (stages,) = planned
    run = photographs.parent / "run"
    tokens, training = (Config.fromfile(run / name) for name in ("tokenizer.py", "pretrain.py"))
    assert tokens.codebook.k == training.model.head.vocab_size == training.model.target_generator.vocab_size
    dataset = training.train_dataloader.dataset
    assert (tokens.token_store, training.work_dir, dataset.store) == ("tokens", "training", "tokens")
    assert tokens.dataset[0].data_prefix == tokens.data_root == str(photographs)
    assert training.train_cfg.max_epochs == training.param_scheduler[1].end == 60
    assert training.param_scheduler[0].end == training.param_scheduler[1].begin == 2
    assert (training.randomness.seed, tokens.codebook.seed) == (7, 7)
    assert training.optim_wrapper.optimizer.lr == pytest.approx(1.5e-3 * (64 / 2048) ** 0.5, rel=1e-2)
    assert training.auto_scale_lr == dict(base_batch_size=64, processes=1)
    assert (tokens.on_error, tokens.max_skipped) == ("skip", 0.05)
    # At least 20 times in a training: an interruption costs a twentieth of it.
    checkpoint = training.default_hooks.checkpoint
    assert (checkpoint.interval, checkpoint.max_keep_ckpts) == (3, 2)
    assert [stage.shown for stage in stages] == [
        f"mapet-mm fit-codebook {run}/tokenizer.py",
        f"mapet-mm extract-tokens {run}/tokenizer.py",
        f"mapet-mm --processes 2 store-images {run}/pretrain.py",
        f"mapet-mm train {run}/pretrain.py --work-dir {run}/training",
        f"mapet-mm convert mm timm {run}/training/epoch_60.pth {run}/timm",
        f"mapet-mm convert mm hf {run}/training/epoch_60.pth {run}/huggingface",
    ]
    with torch.device("meta"):
        backbone = MODELS.build(training.model.backbone)
    assert backbone.embed_dims == {"tiny": 192, "small": 384, "base": 768}[arch]


def test_visible_mim_has_a_recipe_of_its_own_and_is_another_job(photographs, planned, capsys):
    pretrain(options(photographs, "--arch", "tiny", "--method", "visible-mim"))
    assert "method: VisibleMIM, an extension" in capsys.readouterr().out
    run = photographs.parent / "run"
    model = Config.fromfile(run / "pretrain.py").model
    assert model.type == "mapet_mm.VisibleMIM"
    assert (model.backbone.objective, model.backbone.cutting_point) == ("context", 1 + 98)
    assert (model.neck.embed_dims, model.neck.num_heads, model.context_loss) == (192, 3, 0.5)
    assert json.loads((run / "identity.json").read_text())["method"] == "visible-mim"
    assert "VisibleMIM, an extension" in method_words(Run(run))
    with pytest.raises(UserError, match="method"):
        pretrain(options(photographs, "--arch", "tiny"))


def test_mapet_is_the_method_of_runs_that_name_none(photographs, planned):
    pretrain(options(photographs))
    run = photographs.parent / "run"
    assert "method" not in json.loads((run / "identity.json").read_text())
    assert method_words(Run(run)) == ""
    pretrain(options(photographs, "--method", "mapet"))


@pytest.mark.parametrize(
    ("images", "epochs", "free", "stored", "line"),
    [
        (1_281_167, 300, 400e9, True, "193 GB; 400 GB are free"),
        (1_281_167, 300, 380e9, False, "193 GB; 380 GB are free: each epoch decodes"),
        (10, 2, 4e6, True, "0.00151 GB; 0.004 GB are free"),
        (10, 1, 400e9, False, "one epoch decodes each image once"),
        (10, 2, 0, False, "0.00151 GB and the disk does not say how much is free"),  # as some network disks
    ],
)
def test_squares_are_stored_if_several_epochs_read_them_and_half_of_the_disk_has_room(
    images, epochs, free, stored, line, monkeypatch, tmp_path
):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    args = PretrainOptions(images="mine", out=tmp_path, epochs=epochs)
    chosen, said = choices.choose_squares(args, images, images * 3 * 224**2)
    assert chosen == stored
    assert line in said


def test_tiles_are_images_from_the_first_line_to_the_configs(photographs, planned, capsys):
    """Their number, bytes and memory are said; each file is one group; the squares are always stored."""
    scene = np.random.default_rng(0).integers(0, 256, (40, 100, 3), np.uint8)
    Image.fromarray(scene).save(photographs / "scene.png")
    args = options(photographs, "--epochs", "1", "--tiles", "40,10", "--no-verdict")
    pretrain(args)
    printed = capsys.readouterr().out
    assert "tiles: 6 of 40 px, with an overlap of 10, in 4 files; each process" in printed
    assert "squares: each file is decoded once and its tiles stored, in 0.000903 GB" in printed
    names = read_lines(args.out / IMAGES)
    assert names[-3:] == ["scene.png#0,0", "scene.png#30,0", "scene.png#60,0"]
    cfg = Config.fromfile(args.out / "pretrain.py")
    assert (cfg.train_dataloader.dataset.type, cfg.train_dataloader.dataset.square[0]) == (
        "mapet_mm.StoredImages",
        dict(type="mapet_mm.LoadPicture", tile=40),
    )
    cfg = Config.fromfile(args.out / "tokenizer.py")
    images = DATASETS.build(dict(cfg.dataset[0], data_root=str(args.out), data_prefix=str(photographs)))
    assert images[5]["inputs"].shape == (3, 224, 224)
    tile = images.pipeline.transforms[0](images.get_data_info(5))["img"]
    assert np.array_equal(tile, scene[:, 60:, ::-1])
    pretrain(args)  # the same images again
    with pytest.raises(UserError, match=r"tiles.1: 10, now 0"):
        pretrain(options(photographs, "--epochs", "1", "--tiles", "40", "--no-verdict"))
    for wrong in ("40,40", "0", "1,2,3", "a"):
        with pytest.raises(UserError, match="--tiles must be SIDE or SIDE,OVERLAP"):
            PretrainOptions(images="a", out="b", tiles=wrong)
    assert PretrainOptions(images="a", out="b", tiles=40).tiles == (40, 0)


def test_tiles_without_room_for_their_squares_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1e9))
    args = PretrainOptions(images="mine", out=tmp_path, tiles=224)
    with pytest.raises(UserError, match=r"10000 tiles: 1.51 GB .* larger tiles or less overlap"):
        choices.choose_squares(args, 10_000, 10_000 * 3 * 224**2)


JITTER = dict(brightness=0.4, contrast=0.4, saturation=0.4)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_colours_of_squares_are_jittered_on_the_gpu_if_there_is_one(
    photographs, on_gpu, planned, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr("mapet_mm.utils.gpus.require_usable_gpu", lambda: None)
    pretrain(options(photographs, "--epochs", "2"))
    cfg = Config.fromfile(photographs.parent / "run/pretrain.py")
    loader = cfg.train_dataloader
    assert loader.dataset.type == "mapet_mm.StoredImages"
    assert [step.type for step in loader.dataset.square] == ["LoadImageFromFile", "RandomResizedCrop"]
    if on_gpu:
        assert cfg.data_preprocessor.color_jitter == JITTER
        assert loader.collate_fn == dict(type="mapet_mm.whole_batch")
        assert "pipeline" not in loader.dataset
    else:
        jitter, pack = loader.dataset.pipeline
        assert jitter == dict(type="mapet_mm.ColorJitter", **JITTER)
        assert pack.type == "PackInputs"
        assert "color_jitter" not in cfg.data_preprocessor
        assert "collate_fn" not in loader


def test_a_training_on_squares_reads_all_images_but_those_that_are_held_out(tmp_path, planned, monkeypatch):
    random = np.random.default_rng(0)
    for index in range(60):
        path = tmp_path / "mine" / "ab"[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
    pretrain(options(tmp_path / "mine", "--epochs", "2"))

    monkeypatch.chdir(tmp_path / "run")
    names, held_out = (read_lines(file) for file in (IMAGES, HELD_OUT))
    store = TokenStore.create("tokens", names, 14, 16, "digest", tmp_path / "mine")
    store.write(range(60), np.zeros((60, 14, 14), int))
    run_tool(monkeypatch, "store_images.py", "pretrain.py")
    dataset = DATASETS.build(Config.fromfile("pretrain.py").train_dataloader.dataset)
    assert type(dataset) is StoredImages
    paths = [dataset.get_data_info(index)["img_path"] for index in range(len(dataset))]
    trained = [str(Path(path).relative_to(tmp_path / "mine")) for path in paths]
    assert len(held_out) == 6
    assert sorted([*trained, *held_out]) == names


def test_a_training_of_one_epoch_decodes_its_images(photographs, planned):
    pretrain(options(photographs, "--epochs", "1"))
    dataset = Config.fromfile(photographs.parent / "run/pretrain.py").train_dataloader.dataset
    assert dataset.pipeline[-2] == dict(type="mapet_mm.LoadTokenGrid", store="tokens")
    assert dataset.data_prefix == str(photographs)
    assert not any("store-images" in stage.shown for stage in planned[-1])


def test_the_next_commands_name_files_as_they_lie_for_the_caller(photographs, planned, monkeypatch, capsys):
    monkeypatch.chdir(photographs.parent)
    command = ["mine", "--out", "my run", "--epochs", "2"]
    following = [
        "next: mapet-mm evaluate 'my run' --data FOLDER",
        "      mapet-mm finetune 'my run' --images FOLDER --out OUT",
        '      timm.create_model("local-dir:my run/timm", pretrained=True)',
        '      transformers.AutoModel.from_pretrained("my run/huggingface")',
        '      backbone=dict(type="mapet_mm.MaPeTViT", arch="deit-small", img_size=224, patch_size=16, '
        'out_type="featmap", init_cfg=dict(type="Pretrained", '
        'checkpoint="my run/training/epoch_2.pth", prefix="backbone."))  # in an OpenMMLab config',
    ]
    pretrain(parse_args(command))
    assert capsys.readouterr().out.splitlines()[-5:] == following

    # With images held out for a verdict, all protocols run on these.
    Path("my run", HELD_OUT).touch()
    pretrain(parse_args(command))
    following[:1] = [
        "next: mapet-mm evaluate 'my run' --all",
        "      mapet-mm evaluate 'my run' --data FOLDER",
    ]
    assert capsys.readouterr().out.splitlines()[-6:] == following


def test_more_images_may_be_skipped_from_then_on(photographs, planned):
    """The options that the error of a tokenizer tool names; neither is another job."""
    for words, share in (([], 0.05), (["--max-skipped", "1"], 1), (["--retry-skipped"], 1)):
        pretrain(options(photographs, *words))
        assert Config.fromfile(photographs.parent / "run/tokenizer.py").max_skipped == share
        assert ("--retry-skipped" in planned[-1][1].shown) == ("--retry-skipped" in words)


@pytest.mark.parametrize(
    "option",
    [
        "--epochs=0",
        "--batch-size=0",
        "--tokenizer=init",
        "--max-skipped=2",
        "--lr=0",
        "--layer-decay=2",
        "--train=attention",
        "--change=knn",
    ],
)
def test_numbers_that_train_nothing_are_refused(photographs, option, capsys):
    with pytest.raises(SystemExit):
        options(photographs, option)
    assert f"{option.partition('=')[0]} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"), [("--workers", "-1"), ("--processes", "0"), ("--seed", "-1"), ("--seed", str(2**32))]
)
def test_numbers_that_cannot_be_are_refused_before_anything_is_written(capsys, option, value):
    with pytest.raises(SystemExit):
        parse_args(["photos", "--out", "run", option, value])
    assert f"error: {option} must be" in capsys.readouterr().err
