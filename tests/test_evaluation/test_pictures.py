"""What the pictures show is what was computed."""

import numpy as np
import pytest
import torch
from mapet_mm.evaluation.attention import class_token_attention
from torch import nn
from torch.nn import functional as F

from mapet_mm.evaluation.feature_pictures import neighbour_figure, prediction_figure, similarity_figure
from mapet_mm.evaluation.masked_prediction import (
    UNKNOWN_COLOUR,
    Prediction,
    cut_patches,
    join_patches,
    predict_tokens,
    token_patches,
)
from mapet_mm.evaluation.picture_grid import RIGHT, WRONG, Cell, enlarge, heat, picture_grid
from mapet_mm.evaluation.pictures import (
    BACKGROUND_COLOUR,
    chosen_patch,
    component_colours,
    foreground,
    otsu_threshold,
    patch_similarity,
)
from mapet_mm.models import MaPeT


def scene(images: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `(n, 5, 5, 8)` of an object of four kinds of patches on a background of one, and where it is."""
    generator = torch.Generator().manual_seed(0)
    tokens = 0.1 * torch.randn(images, 5, 5, 8, generator=generator)
    tokens[..., 0] -= 3
    inside = torch.zeros(images, 5, 5, dtype=torch.bool)
    inside[:, 1:4, 1:4] = True
    tokens[inside] += 6 * F.one_hot(torch.zeros(int(inside.sum()), dtype=torch.long), 8)
    tokens[:, 1:4, 1:4, 1] += torch.tensor([-1.0, 0.0, 1.0])
    return tokens, inside


def test_the_foreground_is_the_group_of_patches_that_keeps_off_the_borders():
    tokens, inside = scene()
    assert torch.equal(foreground(tokens), inside)
    assert torch.equal(foreground(-tokens), inside)
    below_the_sky = 0.1 * torch.randn(6, 5, 5, 8, generator=torch.Generator().manual_seed(0))
    below_the_sky[:, 0, :, 0] += 6  # it stands out, at the border
    assert torch.equal(foreground(below_the_sky)[0], torch.arange(5)[:, None].expand(5, 5) > 0)
    assert foreground(torch.ones(2, 3, 3, 4)).all()  # nothing stands out


def test_otsu_cuts_between_two_groups():
    values = np.concatenate([np.linspace(0, 1, 50), np.linspace(4, 5, 10)])
    assert 1 < otsu_threshold(values) < 4


def test_colours_are_the_foregrounds_components_and_the_same_in_all_images():
    tokens, inside = scene()
    colours = component_colours(tokens, inside)
    assert (colours[~inside.numpy()] == BACKGROUND_COLOUR).all()
    red = colours[:, 1:4, 1:4, 0].astype(int)  # the strongest component: left, middle, right
    assert (np.diff(red.mean((0, 1))) > 80).all() or (np.diff(red.mean((0, 1))) < -80).all()
    assert np.ptp(red, axis=0).max() < 60
    np.testing.assert_array_equal(component_colours(tokens.clone(), inside), colours)


def test_features_of_fewer_dimensions_than_colours_are_drawn():
    colours = component_colours(torch.randn(2, 3, 3, 2), torch.ones(2, 3, 3, dtype=torch.bool))
    assert colours.shape == (2, 3, 3, 3)


def test_similarity_is_the_cosine_to_the_chosen_patch():
    tokens = torch.randn(2, 3, 4, 5)
    expected = F.cosine_similarity(tokens, tokens[1, 2, 3].expand_as(tokens), dim=-1)
    torch.testing.assert_close(patch_similarity(tokens, 1, 2, 3), expected)


def test_the_chosen_patch_has_contrast_and_is_near_the_middle():
    image = np.zeros((20, 30, 3), np.uint8)
    image[::2, :4] = 255  # at the border
    image[11, 12:18] = 255
    assert chosen_patch(image, (4, 5)) == (2, 2)


class Attends(nn.Module):
    """One layer of attention with a class token, computed in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.qkv = way, nn.Linear(6, 18)
        self.whole = nn.MultiheadAttention(6, 2, batch_first=True)
        self.expected = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = images.flatten(2).mT.repeat(1, 1, 2)  # B 9 6
        if self.way == "module":
            self.expected = self.whole(tokens, tokens, tokens, average_attn_weights=False)[1]
            return self.whole(tokens, tokens, tokens, need_weights=False)[0]
        q, k, v = self.qkv(tokens).view(len(tokens), 9, 3, 2, 3).permute(2, 0, 3, 1, 4)
        self.expected = (q @ k.mT / 3**0.5 + self.bias).softmax(-1)
        if self.way == "fused":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        return torch.bmm(self.expected.flatten(0, 1), v.flatten(0, 1))

    bias = torch.linspace(-1, 1, 81).view(9, 9)


@pytest.mark.parametrize("way", ["fused", "products", "module"])
def test_attention_is_read_however_it_is_computed(way):
    torch.manual_seed(0)
    model = Attends(way).eval()
    seen = class_token_attention(model, torch.randn(4, 3, 3, 3), 1, (2, 4))
    torch.testing.assert_close(seen, model.expected[:, :, 0, 1:].unflatten(-1, (2, 4)).detach())
    assert torch.backends.mha.get_fastpath_enabled()


def test_without_attention_over_the_tokens_there_is_none_to_show():
    assert class_token_attention(nn.Conv2d(3, 8, 3), torch.randn(2, 3, 8, 8), 1, (2, 2)) is None


def test_patches_are_cut_and_joined_again():
    images = [np.random.default_rng(i).integers(0, 255, (6, 8, 3)).astype(np.uint8) for i in range(2)]
    patches = cut_patches(images, (3, 2))
    np.testing.assert_array_equal(patches[7], images[1][0:2, 4:8])
    np.testing.assert_array_equal(join_patches(patches[6:], (3, 2)), images[1])


def test_a_token_is_shown_by_its_patch_nearest_to_their_mean():
    patches = np.array([0, 10, 100, 200, 7], np.uint8)[:, None, None, None].repeat(3, -1)
    shown = token_patches(patches, np.array([2, 2, 2, 0, 0]), 4)
    assert shown[:, 0, 0, 0].tolist()[2] == 10
    assert tuple(shown[1, 0, 0]) == UNKNOWN_COLOUR


def tiny_mapet(objective: str) -> MaPeT:
    torch.manual_seed(0)
    arch = dict(embed_dims=12, num_layers=1, num_heads=2, feedforward_channels=24)
    return MaPeT(
        backbone=dict(
            type="mapet_mm.MaPeTPretrainViT",
            arch=arch,
            img_size=8,
            patch_size=2,
            objective=objective,
            cutting_point=5,
        ),
        head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=12, vocab_size=9),
        target_generator=None,
    ).eval()


@pytest.mark.parametrize(("objective", "one_by_one"), [("mapet", True), ("pim", True), ("mim", False)])
def test_predictions_are_those_that_validation_judges(objective, one_by_one):
    model, images = tiny_mapet(objective), torch.randn(3, 3, 8, 8)
    prediction = predict_tokens(model, images)
    assert prediction.one_by_one == one_by_one
    truth = torch.randint(9, (3, 16))
    latents, _ = model.backbone(images, model.validation_permutation(images))
    _, accuracy = model.head.evaluate(latents, truth.gather(1, prediction.places))
    right = (prediction.tokens == truth.gather(1, prediction.places)).float().mean(1)
    torch.testing.assert_close(100 * right, accuracy)


def test_the_prediction_figure_shows_what_is_seen_and_numbers_the_targets_in_order():
    image = np.full((4, 4, 3), 9, np.uint8)
    prediction = Prediction(torch.tensor([[3, 0]]), torch.tensor([[1, 2]]), torch.zeros(1, 2), True)
    stand_ins = (
        (50 * np.arange(3, dtype=np.uint8))[:, None, None, None].repeat(2, 1).repeat(2, 2).repeat(3, 3)
    )
    figure = prediction_figure([image], prediction, torch.tensor([[2, 0, 0, 2]]), stand_ins, (2, 2))
    seen, predicted, true = (np.asarray(axes.images[0].get_array())[::2, ::2, 0] for axes in figure.axes[1:4])
    assert seen.tolist() == [[226, 9], [9, 226]]
    assert predicted.tolist() == [[100, 9], [9, 50]]
    assert true.tolist() == [[100, 9], [9, 100]]
    order = figure.axes[4]
    assert {text.get_text(): text.get_position() for text in order.texts} == {
        "2": (0.5, 0.5),
        "1": (2.5, 2.5),
    }
    assert order.get_xlabel() == "50 % right"


def test_neighbours_come_by_similarity_and_their_frame_says_whether_the_class_is_the_same():
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.5, 0.5]])
    pictures = [np.full((2, 2, 3), i, np.uint8) for i in range(4)]
    figure = neighbour_figure(pictures.__getitem__, features, torch.tensor([0, 0, 1, 0]), [0])
    assert [int(axes.images[0].get_array()[0, 0, 0]) for axes in figure.axes] == [0, 2, 3, 1]
    colours = [tuple(axes.spines["left"].get_edgecolor()) for axes in figure.axes[1:]]
    assert [colour == tuple(_rgba(WRONG)) for colour in colours] == [True, False, False]
    assert colours[1] == tuple(_rgba(RIGHT))
    assert [axes.get_xlabel() for axes in figure.axes[1:]] == ["0.99", "0.71", "0.00"]


def _rgba(colour: str):
    from matplotlib.colors import to_rgba

    return to_rgba(colour)


def test_one_image_alone_is_similar_to_none():
    figure = similarity_figure([np.zeros((4, 4, 3), np.uint8)] * 2, torch.randn(2, 2, 2, 3))
    assert len(figure.axes) == 3  # the image, itself, the other


def test_a_grid_of_oblong_pictures_keeps_their_shape():
    figure = picture_grid(
        [[Cell(np.zeros((10, 30, 3), np.uint8)), None], [Cell(np.zeros((10, 30, 3), np.uint8))]], "t"
    )
    width, height = figure.get_size_inches()
    for axes in figure.axes:
        box = axes.get_position()
        assert box.height * height / (box.width * width) == pytest.approx(1 / 3)
        assert box.y0 >= 0
        assert box.y1 <= 1


def test_heat_spans_its_ends_and_enlarging_repeats_patches():
    colours = heat(np.array([[0.0, 0.5, 1.0, 9.0]]), 0, 1, "gray")
    assert colours[0, :, 0].tolist() == [0, 128, 255, 255]
    assert enlarge(np.array([[1, 2]]), (2, 5)).tolist() == [[1, 1, 1, 2, 2]] * 2
