"""Segmentation of frozen patch tokens, by value and beside implementations that can be checked by eye."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from clustered_features import MemoryFeatures
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

from mapet_mm.evaluation.images import ImageSetError
from mapet_mm.evaluation.pixel_labels import Areas, join_cells, label_cells, majority
from mapet_mm.evaluation.protocol import Evaluated
from mapet_mm.evaluation.protocols import segmentation
from mapet_mm.evaluation.protocols.segmentation import (
    LabelledImages,
    SegmentationByNeighbours,
    best_setting,
    labelled_patches,
    measured,
)

GRID, DIM, CLASSES = (3, 5), 6, ("background", "cat", "dog", "sky")


def bank(tokens) -> MemoryFeatures:
    tokens = torch.as_tensor(tokens).float()  # n H W D
    flat = tokens.flatten(1, 2)
    known = dict(layers=["output"], poolings=["mean"], grid=tuple(tokens.shape[1:3]), labels=None)
    return MemoryFeatures(flat.mean(1)[None], flat, name="dense", **known)


def images(count: int, seed: int, size=(12, 20)) -> LabelledImages:
    """Blobs of classes over a grid of 3 x 5 patches; the tokens know their class, with noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 4, (count, *GRID))
    centres = np.random.default_rng(9).normal(0, 1, (4, DIM))
    tokens = 3 * centres[coarse] + rng.normal(0, 2, (count, *GRID, DIM)) + 5
    rows, columns = (np.arange(n) * part // n for n, part in zip(size, GRID, strict=True))
    labels = [one[rows[:, None], columns].astype(np.uint8) for one in coarse]
    for one in labels:
        one[:2, :3] = 255
        one[rng.integers(0, 2, one.shape) * rng.integers(0, 2, one.shape) == 1] = 0
    return LabelledImages(bank(tokens), labels)


def areas(train, test, ks) -> tuple[dict[str, Areas], dict[str, Areas]]:
    """On held-out training images and on test images, as features and labels."""
    return measured(labelled_patches(train, 4, side=4), test, ks)


def scaled(train: MemoryFeatures, other: MemoryFeatures) -> np.ndarray:
    rows = [each.tokens(list(range(len(each)))).flatten(0, 2).double().numpy() for each in (train, other)]
    return (rows[1] - rows[0].mean(0)) / rows[0].std(0)


def naive_knn(train, test, k: int, distance: str) -> float:
    """Votes by loops over test patches, neighbours and pixels."""
    keys, queries = scaled(train[0], train[0]), scaled(train[0], test[0])
    cells = np.concatenate([label_cells(each, GRID, 4) for each in train[1]])
    labelled = majority(cells, 4) != 255
    cells = np.where(cells == 255, majority(cells, 4)[:, None], cells)[labelled]
    keys, measured = keys[labelled], Areas(4)
    for image, labels in enumerate(test[1]):
        voted = []
        for query in queries[15 * image : 15 * image + 15]:
            far = np.linalg.norm(keys - query, axis=1)
            if distance == "cosine":
                far = 1 - keys @ query / np.linalg.norm(keys, axis=1) / np.linalg.norm(query)
            pixels = cells[np.argsort(far)[:k]].T.tolist()
            voted.append([max(sorted(set(each)), key=Counter(each).get) for each in pixels])
        measured.add(join_cells(np.array(voted, np.uint8), GRID, labels.shape), labels)
    return measured.miou


@pytest.mark.parametrize(("queries", "keys"), [(2**16, 2**14), (32, 7)])  # at once, and in small parts
def test_votes_are_those_of_a_naive_loop(monkeypatch, queries, keys):
    monkeypatch.setattr(segmentation, "QUERIES", queries)
    monkeypatch.setattr(segmentation, "COLUMNS", keys)
    train, test = images(23, 0), images(6, 1, size=(17, 23))
    _, tested = areas(train, test, (1, 3, 10))
    for distance in ("cosine", "L2"):
        for k in (1, 3, 10):
            found = tested[f"{distance}, k={k}"].miou
            assert found == pytest.approx(naive_knn(train, test, k, distance), abs=0.2)
            assert 40 < found < 100


def test_the_setting_is_chosen_on_held_out_training_images():
    train, test = images(20, 0), images(4, 1)
    chosen_on, tested = areas(train, test, (1, 10))
    kept = [i for i in range(20) if i not in (9, 19)]
    sides = []
    for part in (kept, [9, 19]):
        sides.append(LabelledImages(bank(train.features.tokens(part)), [train.labels[i] for i in part]))
    voters = labelled_patches(train, 4, side=4)
    alone = replace(labelled_patches(sides[0], 4, side=4), mean=voters.mean, scale=voters.scale)
    expected = alone.areas(sides[1], range(2), (1, 10))
    for setting, found in chosen_on.items():
        assert found.miou == pytest.approx(expected[setting].miou)
    assert best_setting(chosen_on) == max(chosen_on, key=lambda name: chosen_on[name].miou)
    assert tested.keys() == chosen_on.keys()


def test_more_neighbours_than_patches_are_all_patches_that_the_choice_has():
    train = images(2, 0)
    chosen_on, tested = areas(train, images(2, 1), (1, 30, 1000))
    most = int(labelled_patches(train, 4, side=4).without([1]).mask.sum())  # one of two is held out
    assert list(chosen_on) == list(tested) == [f"{one}, k={k}" for one in ("cosine", "L2") for k in (1, most)]


def test_patches_that_are_mostly_background_still_vote_for_what_else_they_cover():
    tokens = np.array([[[[1.0, 0.0]]], [[[0.0, 1.0]]]] * 5)
    upper, lower = np.zeros((4, 4), np.uint8), np.zeros((4, 4), np.uint8)
    upper[0], lower[3] = 1, 2
    both = LabelledImages(bank(tokens), [upper, lower] * 5)
    assert areas(both, both, [1])[1]["cosine, k=1"].miou == 100


def test_held_out_images_without_a_label_leave_the_first_setting():
    features, labels = images(4, 0)
    chosen_on, _ = areas(
        LabelledImages(features, [*labels[:3], np.full((12, 20), 255)]), images(2, 1), [1, 3]
    )
    assert best_setting(chosen_on) == "cosine, k=1"


@pytest.mark.parametrize("values", [(2, 2, 2), (255, 255, 255), (255, 255, None)], ids=str)
def test_fewer_than_two_classes_to_learn_from_are_refused(values):
    """One class, no label, and labels in the held-out image alone."""
    labels = [images(1, 0)[1][0] if one is None else np.full((12, 20), one) for one in values]
    with pytest.raises(ImageSetError, match="two classes"):
        areas(LabelledImages(images(3, 0).features, labels), images(2, 1), [1])


def sample(labels) -> SegDataSample:
    data = PixelData(data=torch.from_numpy(labels)[None])
    return SegDataSample(gt_sem_seg=data, metainfo=dict(img_shape=(12, 20)))


def evaluated(classes=CLASSES) -> Evaluated:
    """Images of 12 x 20 pixels whose data sets hold the labels themselves."""
    sets, banks = {}, {}
    for seed, name in enumerate(("dense_train", "dense_val")):
        banks[name], labels = images(12, seed)
        samples = [sample(one) if classes else {} for one in labels]
        dataset = [dict(inputs=torch.zeros(3, 12, 20), data_samples=one) for one in samples]
        sets[name] = SimpleSet(name=name, dataset=dataset, class_names=classes, batch_size=64, path=str)
    return Evaluated(banks, sets, torch.device("cpu"))


class SimpleSet(SimpleNamespace):
    """As much of an `ImageSet` as the protocols use."""

    __hash__ = object.__hash__

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        return self.dataset[index]

    def useful_workers(self, num_images: int) -> int:
        return 0


def test_a_row_for_the_table_and_details_for_settings_and_classes():
    first, *details = SegmentationByNeighbours([1, 3]).rows(evaluated())
    values = {row.setting: row.value for row in details}
    setting = first.note.partition(" (")[0]  # at the edge of the grid
    assert first.value == values[f"test images: {setting}"]
    assert first.interval[0] < first.value < first.interval[1]
    assert first.value == pytest.approx(np.mean([values[f"class: {name}"] for name in CLASSES]))
    assert f"held-out training images: {setting}" in values
    assert [first.detail, *{row.detail for row in details}] == [False, True]


def test_images_without_pixel_labels_give_no_rows_and_a_word(capsys):
    assert SegmentationByNeighbours().rows(evaluated(classes=None)) == []
    assert "no k-NN segmentation" in capsys.readouterr().out


def test_classes_in_another_order_are_refused():
    images = dict(evaluated().images)
    assert SegmentationByNeighbours().unfit(images, {}) is None
    images["dense_val"] = SimpleSet(name="dense_val", class_names=CLASSES[::-1])
    with pytest.raises(ImageSetError, match="class 0 is `background`"):
        SegmentationByNeighbours().unfit(images, {})
