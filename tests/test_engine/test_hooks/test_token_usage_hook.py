"""How stored tokens are used is logged beside the accuracy of what is trained on them."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from mmengine.dataset import BaseDataset, Compose, RepeatDataset

from mapet_mm.datasets.transforms.token_grid import LoadTokenGrid
from mapet_mm.registry import HOOKS
from mapet_mm.structures import TokenStore
from mapet_mm.utils.errors import UserError

NAMES = [f"train/{index}.png" for index in range(4)]


class Labelled(BaseDataset):
    def __init__(self, *steps) -> None:
        super().__init__(pipeline=[], lazy_init=False)
        self.pipeline = Compose(steps)

    def load_data_list(self):
        return [dict(img_path=f"/copy/{name}", gt_label=index // 2) for index, name in enumerate(NAMES[:3])]


class SeveralLabels(Labelled):
    def load_data_list(self):
        return [dict(image, gt_label=[0, image["gt_label"]]) for image in super().load_data_list()]


@pytest.fixture
def load(tmp_path) -> LoadTokenGrid:
    store = TokenStore.create(tmp_path / "tokens", NAMES, (2, 2), 8, "ab" * 32, data_root="/copy")
    ids = [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 2, 2], [7, 7, 7, 7]]
    store.write(range(4), np.array(ids).reshape(4, 2, 2))
    return LoadTokenGrid(store=str(store.path))


def train(dataset) -> dict:
    logged = {}
    runner = SimpleNamespace(
        train_dataloader=SimpleNamespace(dataset=dataset),
        visualizer=SimpleNamespace(add_scalars=lambda scalars, step: logged.update(scalars, step=step)),
        logger=logging.getLogger("test"),
        epoch=5,
    )
    hook = HOOKS.build(dict(type="mapet_mm.TokenUsageHook"))
    hook.before_train(runner)
    hook.after_train(runner)
    return logged


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: RepeatDataset(one, 3)])
def test_perplexity_dead_ids_and_purity_are_those_of_the_training_images(wrap, load):
    """Labels 0, 0, 1; the fourth image is not trained on. Id 0 is in both classes, ids 1 and 2 in one."""
    shares = np.array([6, 4, 2]) / 12
    assert train(wrap(Labelled(load))) == {
        "tokens/perplexity": pytest.approx(np.exp(-(shares * np.log(shares)).sum())),
        "tokens/dead": 5,
        "tokens/purity": pytest.approx(100 * (4 + 4 + 2) / 12),
        "step": 5,
    }


def test_images_without_one_label_are_counted_without_purity(load):
    logged = train(SeveralLabels(load))
    assert logged.keys() == {"tokens/perplexity", "tokens/dead", "step"}


def test_a_training_without_stored_tokens_is_refused_before_it():
    with pytest.raises(UserError, match="no LoadTokenGrid"):
        train(Labelled())
