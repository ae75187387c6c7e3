"""Segmentation of frozen patch tokens, by value and beside implementations that can be checked by eye."""

from collections import Counter

import numpy as np
import pytest
import torch

from mapet_mm.evaluation import dense, dense_images
from mapet_mm.evaluation.dense import DenseEvaluation, vote
from mapet_mm.evaluation.dense_images import DenseImages
from mapet_mm.evaluation.logistic import fit_logistic
from mapet_mm.evaluation.patch_labels import Areas, join_cells, label_cells, majority
from mapet_mm.utils.errors import UserError

CLASSES = ["background", "cat", "dog", "sky"]


def test_a_patch_has_the_labels_that_it_covers_at_any_image_size():
    quarters = np.array([[0, 1], [2, 255]])
    large = quarters.repeat(9, 0).repeat(6, 1)  # 18 x 12
    for labels in (quarters, large):
        cells = label_cells(labels, (2, 2), 3)
        assert cells.tolist() == [[0] * 9, [1] * 9, [2] * 9, [255] * 9]
        np.testing.assert_array_equal(join_cells(cells, (2, 2), labels.shape), labels)


def test_cells_keep_the_places_of_pixels():
    labels = np.arange(24, dtype=np.uint8).reshape(4, 6)
    cells = label_cells(labels, (2, 3), 2)
    assert cells[4].tolist() == [14, 15, 20, 21]
    np.testing.assert_array_equal(join_cells(cells, (2, 3), (4, 6)), labels)


def test_a_patch_is_what_most_of_it_is_and_ignored_where_that_is_ignored():
    cells = np.array([[1, 1, 2, 3], [255, 255, 255, 1], [3, 2, 2, 3]], np.uint8)
    assert majority(cells, 4).tolist() == [1, 255, 2]


def test_areas_are_those_of_the_iou_metric():
    areas = Areas(4)
    areas.add(np.array([[0, 1, 1], [2, 2, 2]]), np.array([[0, 1, 2], [2, 255, 255]]))
    # background 1 of 1, cat 1 of 2, dog 1 of 2, no sky
    assert areas.ious[:3].tolist() == [100, 50, 50]
    assert np.isnan(areas.ious[3])
    assert areas.miou == pytest.approx(200 / 3)


def test_the_first_k_neighbours_vote_pixel_by_pixel_and_the_lower_of_equals_wins():
    cells = np.array([[[3, 1], [2, 1], [2, 0]]], np.uint8)  # 1 query, 3 neighbours, 2 pixels
    voted = vote(cells, 4, [1, 2, 3])
    assert {k: each.tolist() for k, each in voted.items()} == {1: [[3, 1]], 2: [[2, 1]], 3: [[2, 1]]}


def images(count: int, seed: int, size: tuple[int, int] = (12, 20), dim: int = 6) -> DenseImages:
    """Blobs of classes over a grid of 3 x 5 patches; the tokens know their class, with noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 4, (count, 3, 5))
    centres = np.random.default_rng(9).normal(0, 1, (4, dim))
    tokens = (3 * centres[coarse] + rng.normal(0, 2, (count, 3, 5, dim)) + 5).astype(np.float16)
    rows, columns = (np.arange(n) * part // n for n, part in zip(size, (3, 5), strict=True))
    labels = [one[rows[:, None], columns].astype(np.uint8) for one in coarse]
    for one in labels:
        one[:2, :3] = 255
        one[rng.integers(0, 2, one.shape) * rng.integers(0, 2, one.shape) == 1] = 0
    return DenseImages(tokens, labels, side=4)


def naive_knn(train: DenseImages, test: DenseImages, k: int, distance: str, side: int) -> float:
    """Votes by loops over test patches, neighbours and pixels."""
    rows = [each.tokens.reshape(-1, 6).astype(np.float64) for each in (train, test)]
    mean, scale = rows[0].mean(0), rows[0].std(0)
    keys, queries = ((each - mean) / scale for each in rows)
    cells = np.concatenate([label_cells(each, (3, 5), side) for each in train.labels])
    labelled = majority(cells, 4) != 255
    keys, cells, areas = keys[labelled], cells[labelled], Areas(4)
    cells = np.where(cells == 255, majority(cells, 4)[:, None], cells)
    for image, labels in enumerate(test.labels):
        voted = []
        for query in queries[15 * image : 15 * image + 15]:
            far = np.linalg.norm(keys - query, axis=1)
            if distance == "cosine":
                far = 1 - keys @ query / np.linalg.norm(keys, axis=1) / np.linalg.norm(query)
            pixels = cells[np.argsort(far)[:k]].T.tolist()
            voted.append([max(sorted(set(each)), key=Counter(each).get) for each in pixels])
        areas.add(join_cells(np.array(voted, np.uint8), (3, 5), labels.shape), labels)
    return areas.miou


def test_votes_are_those_of_a_naive_loop(monkeypatch):
    train, test = images(23, 0), images(6, 1, size=(17, 23))
    for queries, block in ((2**16, 2**24), (32, 6 * 15 * 4)):  # at once, and in small parts
        monkeypatch.setattr(dense, "QUERIES", queries)
        monkeypatch.setattr(dense_images, "BLOCK", block)
        scores = DenseEvaluation(train, CLASSES).knn(test, ks=(1, 3, 10))
        for distance in ("cosine", "L2"):
            for k in (1, 3, 10):
                expected = naive_knn(train, test, k, distance, 4)
                assert scores.test[f"{distance}, k={k}"] == pytest.approx(expected, abs=0.2)
        assert 40 < scores.miou < 100


def test_the_setting_is_chosen_on_held_out_training_images():
    train, test = images(20, 0), images(4, 1)
    scores = DenseEvaluation(train, CLASSES).knn(test, ks=(1, 10))
    kept = [i for i in range(20) if i not in (9, 19)]
    part, held_out = (
        DenseImages(train.tokens[places], [train.labels[i] for i in places], side=4)
        for places in (kept, [9, 19])
    )
    alone = DenseEvaluation(part, CLASSES)
    alone.mean, alone.scale = (
        DenseEvaluation(train, CLASSES).mean,
        DenseEvaluation(train, CLASSES).scale,
    )
    assert scores.held_out == pytest.approx(alone.knn(held_out, ks=(1, 10)).test)
    assert scores.setting == max(scores.held_out, key=scores.held_out.get)
    assert scores.miou == scores.test[scores.setting]


# Features are kept, or read again in every step; the last blocks are of held-out images alone.
@pytest.mark.parametrize(("kept", "images_a_block"), [(2**28, 4), (0, 4), (0, 1)])
def test_logistic_segmentation_is_scikit_learns(monkeypatch, kept, images_a_block):
    from sklearn.linear_model import LogisticRegression

    monkeypatch.setattr(dense, "KEPT", kept)
    monkeypatch.setattr(dense_images, "BLOCK", 6 * 15 * images_a_block)
    train, test = images(30, 0), images(6, 1)
    evaluation = DenseEvaluation(train, CLASSES)
    scores = evaluation.logistic(test, strengths=(1e-3, 0.1))
    strength = {"C=0.001": 1e-3, "C=0.1": 0.1}[scores.setting]
    rows, queries = (
        (each.tokens.reshape(-1, 6) - evaluation.mean.numpy()) / evaluation.scale.numpy()
        for each in (train, test)
    )
    known = evaluation.labels != 255
    model = LogisticRegression(C=strength).fit(rows[known], evaluation.labels[known])
    areas = Areas(4)
    for index, labels in enumerate(test.labels):
        predicted = model.predict(queries[15 * index : 15 * index + 15]).astype(np.uint8)
        areas.add(join_cells(predicted[:, None], (3, 5), labels.shape), labels)
    assert scores.miou == pytest.approx(areas.miou, abs=0.2)


def test_strengths_that_print_alike_are_told_apart():
    """The last fit takes the strength that the held-out images chose, and not a neighbour in the list."""
    train, test = images(20, 0), images(4, 1)
    evaluation = DenseEvaluation(train, CLASSES)
    expected = evaluation.logistic(test, strengths=(1e-6, 1.0))
    assert expected.setting == "C=1"
    found = evaluation.logistic(test, strengths=(1e-6, 1e-6, 1.0))
    assert (found.setting, found.miou) == (expected.setting, expected.miou)
    found = evaluation.logistic(test, strengths=(1e-6, 1.0001e-6, 1.0))
    assert list(found.held_out) == ["C=1e-06", "C=1.0001e-06", "C=1.0"]
    assert (found.setting, found.miou) == ("C=1.0", pytest.approx(expected.miou, abs=0.2))


def test_regression_weights_are_scikit_learns_wherever_it_starts():
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(300, 5)), rng.integers(0, 3, 300)
    model = LogisticRegression(C=0.3, tol=1e-8).fit(rows, labels)
    expected = np.c_[model.coef_, model.intercept_ - model.intercept_.mean()]
    blocks = [(torch.from_numpy(rows), torch.from_numpy(labels))]
    for start in (None, torch.from_numpy(rng.normal(size=(3, 6)))):
        weights = fit_logistic(lambda: blocks, 3, 0.3, start).numpy()
        weights[:, -1] -= weights[:, -1].mean()  # one more for all classes changes nothing
        np.testing.assert_allclose(weights, expected, atol=2e-3)


def test_more_neighbours_than_patches_are_all_patches_that_the_choice_has():
    """Of two images one is held out; before, the choice knew k=15 and the test k=30 (`KeyError`)."""
    train = images(2, 0)
    evaluation = DenseEvaluation(train, CLASSES)
    scores = evaluation.knn(images(2, 1), ks=(1, 30, 1000))
    patches = int((evaluation.labels[:15] != 255).sum())
    names = [f"{distance}, k={k}" for distance in ("cosine", "L2") for k in (1, patches)]
    assert list(scores.held_out) == list(scores.test) == names
    alone = evaluation.knn(images(2, 1), ks=[patches], distances=["L2"])
    assert alone.miou == scores.test[f"L2, k={patches}"]


@pytest.mark.parametrize("count", [2, 13])
def test_labels_in_held_out_images_alone_are_one_clear_line(count):
    """Before: `KeyError` for neighbours, `StopIteration` for the regression."""
    good, held_out = images(count, 0), [9] if count > 9 else [count - 1]
    blank = np.full((12, 20), 255, np.uint8)
    labels = [one if place in held_out else blank for place, one in enumerate(good.labels)]
    message = (
        f"of {count} labelled training images, all patches are ignored (255) but those of the images that "
        "are held out to choose the setting: label more images"
    )
    with pytest.raises(UserError) as error:
        DenseEvaluation(DenseImages(good.tokens, labels, side=4), CLASSES)
    assert str(error.value) == message


def flawed(labels: np.ndarray) -> DenseImages:
    good = images(4, 0)
    return DenseImages(good.tokens, [*good.labels[:3], labels], [f"{i}.png" for i in range(4)])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            flawed(np.full((12, 20), 4)),
            r"label 4 in the labels of `3.png`.* classes 0 to 3.*reduce_zero_label",
        ),
        (flawed(np.full((12, 20), -1)), r"label -1 in the labels of `3.png`"),
        (DenseImages(images(3, 0).tokens, [np.full((12, 20), 2)] * 3), "one class only, `dog`"),
        (DenseImages(images(3, 0).tokens, [np.full((12, 20), 255)] * 3), r"ignored pixels only \(255\)"),
        (images(1, 0), "1 labelled training image: segmentation needs two"),
    ],
)
def test_labels_that_cannot_be_used_are_one_clear_line(train, message):
    with pytest.raises(UserError, match=message) as error:
        DenseEvaluation(train, CLASSES)
    assert "\n" not in str(error.value)


def test_test_images_without_a_labelled_pixel_are_one_clear_line():
    blank = DenseImages(images(2, 1).tokens, [np.full((12, 20), 255)] * 2, side=4)
    with pytest.raises(UserError, match=r"all ignored \(255\)"):
        DenseEvaluation(images(4, 0), CLASSES).logistic(blank, strengths=[1.0])


def test_held_out_images_without_a_labelled_pixel_leave_the_first_setting():
    good = images(4, 0)
    train = DenseImages(good.tokens, [*good.labels[:3], np.full((12, 20), 255)], side=4)
    assert DenseEvaluation(train, CLASSES).knn(images(2, 1), ks=[1, 3]).setting == "cosine, k=1"


def test_a_backbone_without_patches_is_refused():
    with pytest.raises(UserError, match="no patch tokens"):
        DenseEvaluation(DenseImages(np.zeros((2, 0, 0, 4)), [np.zeros((3, 3), int)] * 2), CLASSES)


def test_patches_that_are_mostly_background_still_vote_for_what_else_they_cover():
    """As those of a convolutional network, whose last grid is coarse."""
    tokens = np.array([[[[1.0, 0.0]]], [[[0.0, 1.0]]]] * 5)
    upper, lower = np.zeros((4, 4), np.uint8), np.zeros((4, 4), np.uint8)
    upper[0], lower[3] = 1, 2
    images = DenseImages(tokens, [upper, lower] * 5, side=4)
    evaluation = DenseEvaluation(images, CLASSES)
    assert evaluation.knn(images, ks=[1]).miou == 100
    assert evaluation.logistic(images, strengths=[1.0]).miou == pytest.approx(75 / 3)  # all background
