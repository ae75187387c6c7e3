"""A verdict by classes or groups that the pre-training was not told, and what it says to do instead."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from held_out_lists import NAMES, SLICES, lists, patients
from mmengine.config import Config

from mapet_mm.cli.configs import leave_out
from mapet_mm.cli.continuing import require_same_classes
from mapet_mm.cli.options import PretrainOptions
from mapet_mm.cli.other_classes import with_other_classes
from mapet_mm.evaluation.images import Data
from mapet_mm.structures import TokenStore
from mapet_mm.utils.errors import UserError
from mapet_mm.utils.run_folder import Run


def test_a_verdict_may_take_groups_that_the_pre_training_did_not(tmp_path, capsys):
    """Half of the groups with images on both sides are tested, and the others vote."""
    (tmp_path / "labels.txt").write_text("".join(f"{name}\t{int(name[1:3]) % 2}\n" for name in SLICES))
    lists(tmp_path, SLICES, labels=tmp_path / "labels.txt")
    (tmp_path / "train.txt").write_text("\n".join(name for name in SLICES if int(name[4:6]) % 10))
    (tmp_path / "held_out.txt").write_text("\n".join(name for name in SLICES if not int(name[4:6]) % 10))
    TokenStore.create(tmp_path / "tokens", SLICES, (1, 1), 8, "digest").write([], np.empty((0, 1, 1), int))
    loader = dict(batch_size=4, dataset=dict(type="CustomDataset", pipeline=[]))
    cfg = Config(dict(evaluation=dict(val=loader), train_cfg=dict(max_epochs=300), randomness=dict(seed=0)))
    asked = Data(labels=tmp_path / "labels.txt", groups="1", workers=3)
    of_others = replace(asked, path="photographs")
    cache = tmp_path / "cache"
    assert with_other_classes(cfg, str(tmp_path), of_others, cache) == (cfg, of_others)
    cfg, left = with_other_classes(cfg, str(tmp_path), asked, cache)
    assert left == Data(workers=3)
    voting, tested = (
        patients(Path(cfg.evaluation[name].dataset.ann_file).read_text().splitlines())
        for name in ("train", "val")
    )
    assert (len(voting), len(tested), voting & tested) == (20, 20, set())
    assert Path(cfg.evaluation.val.dataset.groups).read_text().count("\n") == len(SLICES) - 1
    assert not (tmp_path / "groups.txt").exists()
    assert "40 have images that were trained on, and 20 of them vote" in capsys.readouterr().out


def test_a_verdict_may_take_other_classes_than_the_pre_training(tmp_path):
    """Voters are trained on and tested images held out, as ever; the config's own lists stay."""
    before = lists(tmp_path, class_level=0)
    assert not before["verdict_train.txt"]
    broken = {NAMES.index(before[file][0]): "broken" for file in ("train.txt", "held_out.txt")}
    store = TokenStore.create(tmp_path / "tokens", NAMES, (1, 1), 8, "digest")
    store.write([], np.empty((0, 1, 1), int), broken)
    (tmp_path / "labels.txt").write_text("".join(f"{name}\t{int(name[-5]) % 2}\n" for name in NAMES))
    steps = [dict(type="LoadImageFromFile"), dict(type="PackInputs")]
    dataset = dict(type="CustomDataset", ann_file="images.txt", with_label=False, pipeline=steps)
    loader = dict(batch_size=4, num_workers=0, persistent_workers=False, dataset=dataset)
    training = dict(max_epochs=300)
    cfg = Config(dict(train_dataloader=loader, train_cfg=training, custom_hooks=[], randomness=dict(seed=0)))
    leave_out(cfg, Run(tmp_path), steps[:1])
    assert set(cfg.evaluation) == {"val", "view"}
    cfg, _ = with_other_classes(cfg, str(tmp_path), Data(labels=tmp_path / "labels.txt"), tmp_path / "cache")
    assert set(cfg.evaluation) == {"train", "val"}
    for name, whole in (("train", "train.txt"), ("val", "held_out.txt")):
        lines = Path(cfg.evaluation[name].dataset.ann_file).read_text().splitlines()
        assert {line.rpartition(" ")[0] for line in lines} == set(before[whole][1:])
        assert all(int(line.rpartition(" ")[0][-5]) % 2 == int(line[-1]) for line in lines)
    assert (tmp_path / "verdict_val.txt").read_text().splitlines() == before["verdict_val.txt"]


def test_other_classes_for_a_pre_training_that_is_there_are_the_verdicts(tmp_path):
    args = PretrainOptions(images="mine", out=tmp_path / "my run", labels="l.txt")
    args.out.mkdir()
    require_same_classes(args, {})  # a pre-training without a verdict: another --out
    (args.out / "held_out.txt").write_text("a.jpg")
    with pytest.raises(UserError, match=r"`mapet-mm verdict '.*/my run' --labels l.txt`"):
        require_same_classes(args, {})
    require_same_classes(args, {"labels": "l.txt"})
    args = PretrainOptions(images="mine", out=args.out, class_level="none")
    require_same_classes(args, {"class_level": 0})
    with pytest.raises(UserError, match="--class-level none"):
        require_same_classes(args, {"class_level": 1})
    args = PretrainOptions(images="mine", out=args.out, groups=1)
    require_same_classes(args, {"groups": "1"})
    with pytest.raises(UserError, match=r"without --groups 1.*`mapet-mm verdict .* --groups 1`"):
        require_same_classes(args, {})
