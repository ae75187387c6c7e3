"""The arithmetic that a pre-training step cannot do without: the floor under its time."""

from __future__ import annotations

from mapet_mm.models.objectives import MIM, Objective, group_sizes, visibility

# One product forward, two backward: by the inputs and by the weights.
PASSES = 3


def step_flops(
    objective: Objective,
    num_tokens: int,
    cutting_point: int,
    depth: int,
    dim: int,
    feedforward: int,
    patch_values: int,
    vocab_size: int,
) -> int:
    """Floating-point operations of the products of one image's training step, a multiply-add as two.

    Counted is what the method needs: attention over the keys that a row sees, no other; beyond the last layer
    the predictions only.

    Args:
        objective: the objective.
        num_tokens: `N`, patches and class token.
        cutting_point: `c`.
        depth: number of layers.
        dim: `D`.
        feedforward: width of the MLP.
        patch_values: values of a patch (3 x 16 x 16).
        vocab_size: `V`.
    """
    num_targets = num_tokens - cutting_point
    sees = visibility(objective, cutting_point, num_targets)
    rows, keys = sees.shape
    predictions = group_sizes(objective.predicting_group, cutting_point, num_targets)[0]

    def layer(queries: int, visible: int) -> int:
        # Query and output projection and the MLP for the rows; key and value for the keys; scores and sums.
        return 2 * (dim * (2 * queries * (dim + feedforward) + 2 * keys * dim) + 2 * visible * dim)

    forward = (depth - 1) * layer(rows, int(sees.sum()))
    forward += layer(predictions, int(sees[-predictions:].sum()))
    forward += 2 * predictions * dim * vocab_size
    # Images need no gradient: the patch embedding has one product less.
    return PASSES * forward + (PASSES - 1) * 2 * (num_tokens - 1) * patch_values * dim


def plain_step_flops(num_tokens: int, num_masked: int, depth: int, **sizes: int) -> int:
    """The same for a plain ViT that predicts `num_masked` of its tokens: BEiT."""
    return step_flops(MIM, num_tokens, num_tokens - num_masked, depth, **sizes)
