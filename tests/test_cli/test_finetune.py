"""`mapet-mm finetune`: what is trained, on which images, and that its configs are everybody's."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import mmpretrain
import mmseg
import numpy as np
import pytest
import torch
from forked_processes import run_python
from mmengine.config import Config
from PIL import Image
from starts import save_own_run, save_run

from mapet_mm.cli import finetune
from mapet_mm.cli.command_options import OptionError
from mapet_mm.cli.finetuning.labels import LabelledImages, look
from mapet_mm.cli.finetuning.options import FinetuneOptions
from mapet_mm.cli.finetuning.pretrained import read_run
from mapet_mm.cli.finetuning.recipe import write_recipe
from mapet_mm.cli.finetuning.split import split_labelled
from mapet_mm.cli.stages import Stage
from mapet_mm.datasets.labels import Labels, Split
from mapet_mm.engine.runners.build_runner import build_runner
from mapet_mm.engine.runners.launch import configure_test, configure_training, load_config
from mapet_mm.utils.errors import UserError
from mapet_mm.weight_files import read_checkpoint, write_weights

KINDS = ("dinov2 with registers", "dinov3", "eva02, swiglu")


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """Let stages run in this process; their titles as they do."""
    titles: list[str] = []

    def run(stages: list[Stage], folder: Path, held: object) -> None:
        for stage in stages:
            titles.append(stage.title)
            _, tool, *words = stage.command
            run_tool(Path(tool).name, words)

    monkeypatch.setattr(finetune, "run_stages", run)
    return titles


def run_tool(tool: str, words: list[str]) -> None:
    """What tools/train.py and tools/test.py do, in this process."""
    config = words[0]
    work_dir = words[words.index("--work-dir") + 1]
    if tool == "train.py":
        cfg = load_config(config, None, work_dir)
        configure_training(cfg)
        build_runner(cfg, "none").train()
        return
    options = dict(word.split("=") for word in words[words.index("--cfg-options") + 1 :])
    cfg = load_config(config, options, work_dir)
    configure_test(cfg, words[1])
    build_runner(cfg, "none").test()


def options(run: Path, out: Path, **given: object) -> FinetuneOptions:
    return FinetuneOptions(run=run, out=out, workers=0, **given)


def write_squares(folder: Path, names: list[str]) -> None:
    """A bright or dark square for each name, by the folder that it is in; no two are equal."""
    rng = np.random.default_rng(len(names))
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        low = 150 if "bright" in name else 0
        Image.fromarray(rng.integers(low, low + 100, (40, 36, 3), dtype=np.uint8)).save(folder / name)


def write_masks(folder: Path, names: list[str], void: int = 11) -> tuple[Path, Path]:
    """Scenes of three areas of a brightness each, the last of them not labelled."""
    rng = np.random.default_rng(0)
    for name in names:
        corners = rng.integers(0, 3, (3, 3)).repeat(24, 0).repeat(24, 1)
        noise = rng.integers(0, 40, (72, 72, 1), dtype=np.uint8)
        image, mask = folder / f"images/{name}.jpg", folder / f"masks/{name}.png"
        for path, pixels in (
            (image, 70 * corners.astype(np.uint8)[..., None].repeat(3, 2) + noise),
            (mask, np.where(corners == 2, void, corners).astype(np.uint8)),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return folder / "images", folder / "masks"


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """Real digits in a folder for each, ten of each."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("digits")
    pictures, labels = load_digits(return_X_y=True)
    for label in range(10):
        for number, pixels in enumerate(pictures[labels == label][:10]):
            path = folder / f"{label}/{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray((15 * pixels.reshape(8, 8)).astype(np.uint8)).resize((32, 32)).save(path)
    return folder


def test_digits_are_classified_from_three_starts_and_compared(digits, tmp_path, ran, capsys):
    save_run("dinov2 with registers", tmp_path)
    args = options(tmp_path, tmp_path / "out", images=digits, epochs=2)
    finetune.finetune(args)
    printed = capsys.readouterr().out
    assert "images: 100; 10 classes (`0`, `1`" in printed
    assert "held out, to measure on: 20 of 100 images" in printed
    assert "labels to train on, by class: 0: 8, 1: 8, 2: 8" in printed
    assert "2 epochs of 80 images, 160 images forward and backward; 3 times" in printed
    starts = ["this pre-training", "its start", "random weights"]
    assert ran == [f"{what} from {start}" for start in starts for what in ("training", "test")]

    out = tmp_path / "out"
    lines = (out / "val.txt").read_text().splitlines()
    assert all(line == f"{line.rpartition(' ')[0]} {line[0]}" for line in lines)
    text = (out / "finetune.py").read_text()
    assert text.count("\n") < 100
    assert "Mixup" not in text  # of fewer than 1,000 labels
    assert "layer_decay_rate=0.75" in text

    # Each began where it says.
    result = read_checkpoint(tmp_path / "training/epoch_10.pth")[0]
    name = "backbone.timm_model.blocks.0.attn.qkv.weight"
    for folder, start in (("from_pretraining", result[name]), ("from_start", result[name] / 2)):
        trained = torch.load(out / folder / "epoch_2.pth", weights_only=True)["state_dict"][name]
        assert 0 < (trained - start).abs().max() < 0.01
    # The table is of what each image adds.
    verdict = json.loads((out / "result.json").read_text())
    right = np.load(out / "from_pretraining/by_image_2.npy")[:, 0, 0]
    assert len(right) == 20
    assert verdict["measures"][0]["values"]["this pre-training"] == pytest.approx(100 * right.mean())
    assert re.search(r"^top-1 \(%\) +[\d.]+ \[", printed, re.MULTILINE)

    # The same command goes on, and has nothing left to test.
    del ran[:]
    finetune.finetune(args)
    assert ran == [f"training from {start}" for start in starts]
    with pytest.raises(UserError, match=r"other settings .*epochs.*take another --out"):
        finetune.finetune(options(tmp_path, out, images=digits, epochs=3))
    weights, meta = read_checkpoint(tmp_path / "training/epoch_10.pth")
    write_weights(tmp_path / "training/epoch_20.pth", weights, meta)  # the pre-training goes on
    with pytest.raises(
        UserError, match=r"other settings .*epoch_10.pth, now epoch_20.pth.*take another --out"
    ):
        finetune.finetune(args)
    (tmp_path / "training/epoch_20.pth").unlink()
    more = tmp_path / "more"
    shutil.copytree(digits, more)
    (more / "3/0.png").unlink()
    identity = json.loads((out / "identity.json").read_text())
    (out / "identity.json").write_text(json.dumps({**identity, "images": str(more)}))
    with pytest.raises(UserError, match=r"other settings .*labels.*take another --out"):
        finetune.finetune(options(tmp_path, out, images=more, epochs=2))


@pytest.mark.parametrize(
    ("count", "frozen", "mixes"), [(999, False, False), (1000, False, True), (1000, True, False)]
)
def test_images_are_mixed_from_a_thousand_labels_on(count, frozen, mixes, tmp_path):
    save_own_run(tmp_path)
    names = [f"{number % 2}/{number}.png" for number in range(count + 2)]
    labels = LabelledImages(tmp_path, Split(names[:-2], names[-2:]), ["0", "1"], {}, None, [])
    (tmp_path / "out").mkdir()
    args = options(tmp_path, tmp_path / "out", images=tmp_path, frozen=frozen)
    write_recipe(args, labels, read_run(args))
    cfg = Config.fromfile(tmp_path / "out/finetune.py")
    assert ("augments" in cfg.model.get("train_cfg", {})) == mixes
    assert cfg.optim_wrapper.paramwise_cfg.layer_decay_rate == (1.0 if frozen else 0.75)
    assert (
        Config.fromfile(tmp_path / "out/from_random.py").optim_wrapper.paramwise_cfg.layer_decay_rate == 1.0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_continued_vit_is_trained_on_masks_by_upernet_resumed_and_tested(kind, tmp_path, ran, capsys):
    save_run(kind, tmp_path, depth=4)
    names = [f"{part}/{number}" for part, count in (("train", 8), ("val", 2)) for number in range(count)]
    folders = write_masks(tmp_path, names)
    args = options(tmp_path, tmp_path / "out", masks=folders, ignore=(255, 11), epochs=10, no_compare=True)
    finetune.finetune(args)
    printed = capsys.readouterr().out
    assert "split by folders: 8 images to train on, 2 held out" in printed
    assert "ignored: value 11" in printed
    assert ran == ["training from this pre-training", "test from this pre-training"]
    cfg = Config.fromfile(tmp_path / "out/finetune.py")
    steps = 10 * 8 // cfg.train_dataloader.batch_size
    assert steps >= 20
    assert cfg.model.backbone.out_indices == [0, 1, 2, 3]
    figure = float(re.search(r"^mIoU \(%\) +([\d.]+) \[", printed, re.MULTILINE)[1])
    logged = json.loads((tmp_path / "out/result.json").read_text())["measures"][0]["values"]
    assert figure == pytest.approx(logged["this pre-training"], abs=0.05)
    meta = torch.load(tmp_path / "out/from_pretraining/epoch_10.pth", weights_only=True)["meta"]
    assert meta["iter"] == steps

    # Stopped half-way, it goes on to the same weights.
    work_dir = tmp_path / "out/from_pretraining"
    whole = torch.load(work_dir / "epoch_10.pth", weights_only=True)["state_dict"]
    (work_dir / "epoch_10.pth").unlink()
    (work_dir / "last_checkpoint").write_text(str(work_dir / "epoch_9.pth"))
    finetune.finetune(args)
    resumed = torch.load(work_dir / "epoch_10.pth", weights_only=True)["state_dict"]
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize(("processes", "of_each", "rate"), [(1, 8, 2e-4), (4, 2, 2e-4), (16, 2, 4e-4)])
def test_processes_share_the_images_of_a_step_and_their_statistics(
    processes, of_each, rate, tmp_path, monkeypatch
):
    """A step of more images, since no process takes one alone, has the rate of its images."""
    save_own_run(tmp_path, depth=4)
    parts = [f"train/{number}" for number in range(32)] + ["val/0"]
    masks = write_masks(tmp_path, parts)
    stages: list[Stage] = []
    monkeypatch.setattr(finetune, "run_stages", lambda made, *_: stages.extend(made))
    monkeypatch.setattr(finetune, "compare", lambda *_: None)
    finetune.finetune(options(tmp_path, tmp_path / "out", masks=masks, processes=processes))
    cfg = Config.fromfile(tmp_path / "out/finetune.py")
    assert cfg.train_dataloader.batch_size == of_each
    assert cfg.optim_wrapper.optimizer.lr == rate
    norms = {cfg.model.neck.norm_cfg.type, cfg.model.decode_head.norm_cfg.type}
    assert norms == {"BN" if processes == 1 else "SyncBN"}
    assert all((f"--nproc_per_node={processes}" in stage.command) == (processes > 1) for stage in stages)


@pytest.mark.slow
def test_two_processes_train_resume_and_measure_each_held_out_image_once(tmp_path):
    save_run("dinov2 with registers", tmp_path, depth=4)
    names = [f"{part}/{number}" for part, count in (("train", 8), ("val", 3)) for number in range(count)]
    images, masks = write_masks(tmp_path, names)
    out = tmp_path / "out"
    labelled = ("--masks", images, masks, "--ignore", "11", "--epochs", "2", "--workers", "0")
    job = ("-m", "mapet_mm.cli.main", "--processes", "2", "finetune", tmp_path, *labelled, "--no-compare")
    assert "mIoU (%)" in run_python(*job, "--out", out)
    work_dir = out / "from_pretraining"
    sums = np.load(work_dir / "by_image_2.npy")
    assert len(sums) == 3
    run_tool("test.py", [str(out / "finetune.py"), str(work_dir / "epoch_2.pth"), *of_one(tmp_path)])
    np.testing.assert_allclose(np.load(tmp_path / "one.npy"), sums, atol=20)  # pixels between two classes

    whole = torch.load(work_dir / "epoch_2.pth", weights_only=True)["state_dict"]
    (work_dir / "epoch_2.pth").unlink()
    (work_dir / "last_checkpoint").write_text(str(work_dir / "epoch_1.pth"))
    run_python(*job, "--out", out)
    resumed = torch.load(work_dir / "epoch_2.pth", weights_only=True)["state_dict"]
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=2e-5)


def of_one(folder: Path) -> list[str]:
    """Arguments of a test in one process, which keeps what each image adds."""
    evaluator = dict(type="mapet_mm.ByImage", metric="IoUMetric", file=folder / "one.npy")
    words = [f"test_evaluator.{name}={value}" for name, value in evaluator.items()]
    return ["--work-dir", str(folder / "one"), "--cfg-options", *words]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_linear_layer_on_masks_of_several_endings_by_whole_groups(frozen, tmp_path, ran, capsys):
    save_own_run(tmp_path)
    names = [f"clip{clip}_{frame}" for clip in range(6) for frame in range(4)]
    images, masks = write_masks(tmp_path, names)
    for name in names[::3]:
        Image.open(images / f"{name}.jpg").save(images / f"{name}.png")
        (images / f"{name}.jpg").unlink()
    lines = [f"{path.name}\t{path.name.partition('_')[0]}" for path in sorted(images.iterdir())]
    (tmp_path / "groups.txt").write_text("\n".join(lines))
    args = options(
        tmp_path,
        tmp_path / "out",
        masks=(images, masks),
        ignore=(11,),
        head="linear",
        frozen=frozen,
        groups=str(tmp_path / "groups.txt"),
        epochs=1,
    )
    finetune.finetune(args)
    printed = capsys.readouterr().out
    assert "6 groups" in printed
    assert ran[::2] == ["training from this pre-training", "training from random weights"]
    listed = {}
    for part in ("train", "val"):
        listed[part] = []
        for file in (tmp_path / "out").glob(f"{part}*.txt"):
            listed[part] += file.read_text().split()
    clips = [{name.partition("_")[0] for name in listed[part]} for part in ("train", "val")]
    assert sorted(listed["train"] + listed["val"]) == sorted(names)
    assert clips[0].isdisjoint(clips[1])
    assert "are of one group, too few to draw" in printed
    trained = torch.load(tmp_path / "out/from_pretraining/epoch_1.pth", weights_only=True)["state_dict"]
    start = read_checkpoint(tmp_path / "training/epoch_2.pth")[0]
    name = "backbone.layers.0.attn.qkv.weight"
    assert torch.equal(trained[name], start[name]) == frozen


@pytest.mark.parametrize("library", [mmpretrain, mmseg])
def test_the_config_is_accepted_by_the_librarys_own_train_tool(library, tmp_path, ran, monkeypatch):
    save_own_run(tmp_path, depth=4)
    if library is mmseg:
        labels = dict(masks=write_masks(tmp_path, ["train/0", "train/1", "val/2"]), ignore=(11, 255))
    else:
        write_squares(tmp_path / "i", [f"{name}/{i}.png" for name in ("bright", "dark") for i in range(5)])
        labels = dict(images=tmp_path / "i")
    monkeypatch.setattr(finetune, "run_stages", lambda *_: None)
    monkeypatch.setattr(finetune, "compare", lambda *_: None)
    finetune.finetune(options(tmp_path, tmp_path / "out", epochs=1, **labels))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    tool = Path(library.__file__).parent / ".mim/tools/train.py"
    monkeypatch.setattr(sys, "argv", [str(tool), str(tmp_path / "out/finetune.py"), "--work-dir", "work"])
    runpy.run_path(str(tool), run_name="__main__")
    assert Path("work/epoch_1.pth").is_file()


def test_what_masks_cannot_change_is_refused_before_they_are_read(tmp_path):
    """Too few images or layers, and groups that are none: the masks here could not be read."""
    save_own_run(tmp_path)
    write_squares(tmp_path / "i", [f"{number}.png" for number in range(5)])
    write_squares(tmp_path / "m", [f"{number}.png" for number in range(5)])
    masks = (tmp_path / "i", tmp_path / "m")
    for given, message in (
        (dict(processes=4), r"4 images to train on are too few for 4 processes.*add --processes 3"),
        (dict(groups="gone.txt"), r"--groups gone.txt: FileNotFoundError"),
        (dict(head="upernet"), r"UperNet takes four layers, and this ViT has 2: add --head linear"),
        (dict(processes=3), r"[0-4]\.png. "),  # by a mask in colours
    ):
        with pytest.raises(UserError, match=message):
            finetune.finetune(options(tmp_path, tmp_path / "out", masks=masks, **{"head": "linear", **given}))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"claim", "left_out.json"}


def test_classes_are_what_a_file_says(tmp_path, monkeypatch, capsys):
    save_own_run(tmp_path)
    names = [f"{number}.png" for number in range(10)]
    write_squares(tmp_path / "i", [*names, "two\nlines.png"])
    (tmp_path / "labels.txt").write_text("".join(f"{name}\t{'ab'[int(name[0]) % 2]}\n" for name in names))
    monkeypatch.setattr(finetune, "run_stages", lambda *_: None)
    monkeypatch.setattr(finetune, "compare", lambda *_: None)
    labels = dict(images=tmp_path / "i", labels=tmp_path / "labels.txt")
    finetune.finetune(options(tmp_path, tmp_path / "out", **labels))
    printed = capsys.readouterr().out
    assert "labels to train on, by class: a: 4, b: 4" in printed
    assert "left out: 1 with a line break or no UTF-8 in their names" in printed
    lines = (tmp_path / "out/train.txt").read_text().splitlines()
    assert all(int(line[0]) % 2 == int(line[-1]) for line in lines)
    with pytest.raises(UserError, match=r"no folder per class \(--labels FILE names classes"):
        finetune.finetune(options(tmp_path, tmp_path / "other", images=tmp_path / "i"))


def test_images_are_read_as_the_pre_training_reads_them(tmp_path):
    """Not as its tokenizer, which may see other bands or other photographs."""
    save_own_run(tmp_path)
    load = dict(type="mapet_mm.LoadPicture", range=(0, 4095), bands=[1, 2, 3, 4])
    for name, step in (("pretrain.py", load), ("tokenizer.py", dict(load, bands=[1, 2, 3]))):
        file = tmp_path / name
        cfg = Config.fromfile(file) if file.exists() else Config(dict())
        cfg.train_dataloader = dict(dataset=dict(pipeline=[step]))
        cfg.dataset = [dict(pipeline=[step])]
        cfg.dump(file)
    assert read_run(options(tmp_path, tmp_path / "out", images="i")).load_image["bands"] == [1, 2, 3, 4]


def test_an_image_of_16_bits_among_photographs_is_not_cut_to_8(tmp_path, ran):
    save_own_run(tmp_path)
    write_squares(tmp_path / "i", [f"{name}/{i}.png" for name in ("bright", "dark") for i in range(5)])
    deep = np.full((40, 36), 4000, np.uint16)
    for name in ("bright", "dark"):  # in one part or the other
        Image.fromarray(deep).save(tmp_path / f"i/{name}/deep.png")
    with pytest.raises(Exception, match=r"deep\.png.*values of 16 bits, where a photograph has 8"):
        finetune.finetune(
            options(tmp_path, tmp_path / "out", images=tmp_path / "i", epochs=1, no_compare=True)
        )


def test_the_few_images_that_cannot_be_decoded_are_left_out_and_named(tmp_path, monkeypatch, capsys):
    save_own_run(tmp_path)
    write_squares(tmp_path / "i", [f"{name}/{i}.png" for name in ("bright", "dark") for i in range(10)])
    (tmp_path / "i/bright/cut.png").write_bytes((tmp_path / "i/bright/1.png").read_bytes()[:200])
    monkeypatch.setattr(finetune, "run_stages", lambda *_: None)
    monkeypatch.setattr(finetune, "compare", lambda *_: None)
    args = options(tmp_path, tmp_path / "out", images=tmp_path / "i", no_compare=True)
    finetune.finetune(args)
    assert "images that cannot be decoded, left out: 1, see " in capsys.readouterr().out
    ((name, reason),) = json.loads((tmp_path / "out/left_out.json").read_text()).items()
    assert (name, bool(reason)) == ("bright/cut.png", True)
    listed = [(tmp_path / f"out/{part}.txt").read_text() for part in ("train", "val")]
    assert sum(text.count("\n") + 1 for text in listed) == 20
    assert not any("cut" in text for text in listed)
    with monkeypatch.context() as second_start:  # reads the list
        second_start.setattr("mapet_mm.datasets.reading.read_whole", lambda *_: pytest.fail("decoded again"))
        finetune.finetune(args)

    (tmp_path / "i/dark/empty.png").touch()
    with pytest.raises(UserError, match=r"2 of 22 images cannot be decoded: `.*bright/cut\.png \("):
        finetune.finetune(options(tmp_path, tmp_path / "other", images=tmp_path / "i", no_compare=True))


def test_images_with_masks_that_cannot_be_decoded_are_left_out_and_named(tmp_path, monkeypatch, capsys):
    save_own_run(tmp_path)
    images, masks = write_masks(tmp_path, [f"{number:02d}" for number in range(22)])
    (images / "07.jpg").write_bytes((images / "07.jpg").read_bytes()[:100])
    monkeypatch.setattr(finetune, "run_stages", lambda *_: None)
    monkeypatch.setattr(finetune, "compare", lambda *_: None)
    given = dict(masks=(images, masks), ignore=(11,), head="linear", no_compare=True)
    finetune.finetune(options(tmp_path, tmp_path / "out", **given))
    assert "images that cannot be decoded, left out: 1, see " in capsys.readouterr().out
    listed = [
        name for part in ("train", "val") for name in (tmp_path / f"out/{part}.txt").read_text().split()
    ]
    assert sorted(listed) == [f"{number:02d}" for number in range(22) if number != 7]

    (images / "09.jpg").write_bytes(b"")
    with pytest.raises(UserError, match=r"2 of 22 images cannot be decoded: `.*07\.jpg \(.*09\.jpg \("):
        finetune.finetune(options(tmp_path, tmp_path / "other", **given))


def test_weights_of_another_network_are_refused_before_anything_is_made(tmp_path):
    save_own_run(tmp_path)
    write_squares(tmp_path / "i", ["bright/1.png", "dark/1.png"])
    weights, _ = read_checkpoint(tmp_path / "training/epoch_2.pth")
    del weights["backbone.layers.1.attn.qkv.weight"]
    write_weights(tmp_path / "training/epoch_2.pth", weights)
    with pytest.raises(UserError, match=r"epoch_2.pth lacks 1 of the backbone's \d+ weights, `layers.1.attn"):
        finetune.finetune(options(tmp_path, tmp_path / "out", images=tmp_path / "i"))
    with pytest.raises(UserError, match=r"is no RUN: it has no pretrain\.py"):
        finetune.finetune(options(tmp_path / "i", tmp_path / "out", images=tmp_path / "i"))


def test_nothing_near_what_is_measured_on_is_trained_on(tmp_path):
    names = [
        f"{part}/{label}/{i}.png" for part in ("train", "val") for label in ("bright", "dark") for i in "12"
    ]
    write_squares(tmp_path, names)
    (tmp_path / "train/dark/2.png").write_bytes((tmp_path / "val/dark/1.png").read_bytes())
    split, words = split_labelled(Labels(names), tmp_path, seed=0)
    assert split.held_out == names[4:]
    assert split.trained == [name for name in names[:4] if name != "train/dark/2.png"]
    assert words[1] == "images to train on that are copies of held-out images, left out: 1 of 4"

    groups = {name: name[-5] for name in names}
    groups["val/dark/1.png"] = groups["val/bright/1.png"] = "2"
    split, words = split_labelled(Labels(names, groups=groups), tmp_path, seed=0)
    assert split.trained == ["train/bright/1.png", "train/dark/1.png"]
    assert "of groups that are held out (`2`), left out: 2 of 4" in words[1]


def test_a_class_that_only_held_out_images_have_has_a_number_and_a_line(tmp_path):
    images = tmp_path / "i"
    write_squares(images, [f"train/{label}/{i}.png" for label in ("bright", "dark") for i in "12"])
    write_squares(images, [f"val/{label}/3.png" for label in ("bright", "dark", "grey")])
    (tmp_path / "out").mkdir()
    load = dict(type="mapet_mm.LoadPicture")
    found = look(options(tmp_path, tmp_path / "out", images=images), load)
    assert found.classes == ["bright", "dark", "grey"]
    assert found.lists["val.txt"] == ["val/bright/3.png 0", "val/dark/3.png 1", "val/grey/3.png 2"]
    assert found.words[-1] == "no image to train on has the class `grey`: none can be found"


def test_images_that_the_pretraining_did_not_see_are_held_out(tmp_path):
    names = [f"{label}/{i:02}.png" for label in ("bright", "dark") for i in range(20)]
    write_squares(tmp_path, names)
    classes = {name: name.partition("/")[0] for name in names}
    new = ["bright/03.png", "bright/04.png", "dark/07.png"]
    seen = set(names).difference(new)
    split, words = split_labelled(Labels(names, classes), tmp_path, seed=0, seen=seen)
    assert split.held_out == new
    assert words == ["held out, to measure on: 3 of 40 images, which the pre-training did not see"]
    # Without one of a class, or of a group, they would say nothing of it.
    groups = dict.fromkeys(new, "one") | {name: name for name in seen} | {"dark/00.png": "one"}
    for labels, lacking in (
        (Labels(names, classes), {"dark/07.png"}),
        (Labels(names, classes, groups), set()),
    ):
        split, words = split_labelled(labels, tmp_path, seed=0, seen=seen | lacking)
        num_seen = len(set(split.held_out) & (seen | lacking))
        assert num_seen >= 4
        assert words[-1].startswith(
            f"{num_seen} of the {len(split.held_out)} held-out images were in the pre-"
        )


def test_copies_and_groups_stay_on_one_side(tmp_path):
    names = [f"{label}/{i}.png" for label in ("bright", "dark") for i in range(20)]
    write_squares(tmp_path, names)
    for i in range(10):
        (tmp_path / f"dark/{i + 10}.png").write_bytes((tmp_path / f"dark/{i}.png").read_bytes())
    classes = {name: name.partition("/")[0] for name in names}
    split, _ = split_labelled(Labels(names, classes), tmp_path, seed=0)
    assert sorted(split.trained + split.held_out) == sorted(names)
    assert 6 <= len(split.held_out) <= 10
    for i in range(10):
        assert (f"dark/{i}.png" in split.held_out) == (f"dark/{i + 10}.png" in split.held_out)
    assert {classes[name] for name in split.held_out} == {"bright", "dark"}
    # Of three recordings, all larger than a fifth, one is held out.
    groups = {name: str(index * 3 // 40) for index, name in enumerate(names)}
    split, _ = split_labelled(Labels(names, groups=groups), tmp_path, seed=0)
    assert len({groups[name] for name in split.held_out}) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(), "either --images FOLDER or --masks IMAGES MASKS"),
        (dict(images="i", masks=("i", "m")), "either --images"),
        (dict(images="i", ignore="11"), "--ignore is about"),
        (dict(images="i", head="linear"), "--head is of a segmentation"),
        (dict(masks=("i", "m"), labels="l.txt"), "about the classes of --images"),
        (dict(images="i", labels="l.txt", class_level=1), "--labels and --class-level exclude each other"),
        (dict(masks=("i", "m"), ignore="256"), "--ignore must be numbers of 0 to 255, such as 255,11"),
    ],
)
def test_options_that_cannot_be_are_refused(given, message):
    with pytest.raises(OptionError, match=message):
        FinetuneOptions(run="r", out="o", **given)


def test_a_file_of_groups_is_the_same_by_any_path(tmp_path, monkeypatch):
    (tmp_path / "clips.txt").write_text("a.png 1\nb.png 2")
    monkeypatch.chdir(tmp_path)
    kept = [
        FinetuneOptions(run="r", out="o", images="i", groups=str(file)).recorded()
        for file in ("clips.txt", tmp_path / "clips.txt")
    ]
    assert kept[0] == kept[1]


def test_the_command_line_has_the_options():
    words = ["RUN", "--masks", "IMAGES", "MASKS", "--out", "OUT"]
    args = finetune.parse_args([*words, "--ignore", "255,11", "--groups", "1", "--no-compare"])
    assert args.masks == (Path("IMAGES"), Path("MASKS"))
    assert args.ignore == (255, 11)
    assert (args.decoder, args.no_compare, args.groups) == ("upernet", True, "1")
    args = finetune.parse_args([*words, "--ignore", "none", "--frozen"])
    assert (args.decoder, args.ignore) == ("linear", ())
