"""Images that a RUN was pre-trained on are known by their files, whatever path leads there."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from mmengine.config import Config

from mapet_mm.datasets.seen import pretrained_on
from mapet_mm.evaluation.run import say_seen
from mapet_mm.utils.run_folder import HELD_OUT, IMAGES, PRETRAINING, TRAINED, Run


@pytest.fixture
def run(tmp_path) -> Run:
    """One of three pictures in two folders, of which one is held out."""
    photos = tmp_path / "photos"
    for name in ("cats/1.png", "cats/2.png", "dogs/1.png"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).touch()
    run = Run(tmp_path / "run")
    run.folder.mkdir()
    dataset = dict(type="mapet_mm.ImageFolder", data_prefix=str(photos))
    Config(dict(train_dataloader=dict(dataset=dataset))).dump(run / PRETRAINING)
    (run / IMAGES).write_text("cats/1.png\ncats/2.png\ndogs/1.png\n")
    (run / TRAINED).write_text("cats/1.png\ndogs/1.png\n")
    (run / HELD_OUT).write_text("cats/2.png\n")
    return run


def test_the_same_files_are_known_by_any_path(run, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "photos/cats")
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies/1.png").touch()
    photos = tmp_path / "photos"
    seen = [f"{photos}/cats/1.png", f"{tmp_path}/link/1.png", f"{photos}/dogs/../dogs/1.png#0,224"]
    others = [f"{photos}/cats/2.png", f"{tmp_path}/copies/1.png", "1.png"]
    assert pretrained_on(run, [*seen, *others]) == set(seen)
    (run / HELD_OUT).unlink()  # of a RUN without a verdict all were trained on
    assert pretrained_on(run, others) == {f"{photos}/cats/2.png"}
    (run / IMAGES).unlink()
    assert pretrained_on(run, seen) == set()


def test_tested_images_that_were_pretrained_on_are_said(run, capsys):
    """Not those that are learnt from; and of no model that is no RUN."""
    photos = Path(run.config.train_dataloader.dataset.data_prefix)
    files = [str(photos / name) for name in ("cats/1.png", "cats/2.png")]
    images = {name: SimpleNamespace(files=files) for name in ("train", "val")}
    say_seen(run.config, images)
    assert capsys.readouterr().out.startswith("1 of 2 `val` images were in the pre-training, without labels")
    say_seen(Config(), images)
    assert not capsys.readouterr().out
