"""Settings are equal however they are written, and a folder keeps to those it was made with."""

from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from mmpretrain.models import VQKD

from mapet_mm.utils.errors import UserError
from mapet_mm.utils.identity import (
    canonical,
    digest,
    digest_of_file,
    explain,
    require_settings,
)

LOAD, FLIP, PACK = (dict(type=name) for name in ("Load", "Flip", "Pack"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (dict(a=1, b=2), dict(b=2, a=1)),
        (dict(size=(1, 2)), ConfigDict(size=[1, 2])),
        (dict(type="mmpretrain.VQKD"), dict(type=VQKD)),
        (dict(type="VQKD"), dict(type="mmpretrain.models.VQKD")),
        (Path("a/b"), "a/b"),
        (np.float64(0.5), 0.5),
        (torch.tensor(3), 3),
    ],
)
def test_equal_settings_have_one_digest(one, other):
    assert canonical(one) == canonical(other)
    assert digest(one) == digest(other)
    assert explain(one, other) is None


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (dict(optimizer=dict(lr=0.1)), dict(optimizer=dict(lr=0.2)), "optimizer.lr: 0.1, now 0.2"),
        (dict(a=1), dict(a=1, b=2), "b: None, now 2"),
        ([dict(k=1), dict(k=2)], [dict(k=1), dict(k=3)], "1.k: 2, now 3"),
        ([1], [1, 2], "1: added 2"),
        (dict(steps=["a", "b", "c"]), dict(steps=["b", "c"]), "steps.0: removed a"),
        (dict(steps=[LOAD, PACK]), dict(steps=[LOAD, FLIP, PACK]), "steps.1: added {'type': 'Flip'}"),
        ([dict(k=1), 5], [dict(k=2), 6, 7], "0.k: 1, now 2"),
        (1, 2, "value: 1, now 2"),
    ],
)
def test_the_first_difference_is_named(before, now, said):
    assert explain(before, now) == said
    assert digest(before) != digest(now)


def test_a_folder_keeps_to_its_settings(tmp_path):
    folder, words = tmp_path / "features", ("feature folder", "choose another")
    require_settings(folder, dict(layer=3, size=(2, 2)), *words)
    require_settings(folder, dict(size=[2, 2], layer=3), *words)
    with pytest.raises(UserError, match="layer: 3, now 4"):
        require_settings(folder, dict(layer=4, size=(2, 2)), *words)


def test_a_files_digest_is_sha256(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert digest_of_file(tmp_path / "x").startswith("ba7816bf8f01cfea414140de5dae2223")
