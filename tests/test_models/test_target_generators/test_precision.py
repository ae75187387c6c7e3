"""An encoder's precision: the authors' features in float16, an identity for each, and float32's as before."""

import numpy as np
import pytest
import torch
from open_clip.model import convert_weights_to_lp
from torch import nn

from mapet_mm.models.target_generators.kclip import build_tower
from mapet_mm.structures.codebook import Codebook
from mapet_mm.tokenizers import KCLIP, GridKMeans, TokenizerError, grid_features
from mapet_mm.utils.precision import PRECISIONS

TOWER = dict(layers=[1, 1, 1, 1], width=8, image_size=128)
DTYPES = dict(float16=torch.float16, bfloat16=torch.bfloat16)


@pytest.fixture(scope="module")
def reference(data_dir) -> dict[str, torch.Tensor]:
    with np.load(data_dir / "kclip_reference.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


@pytest.fixture(scope="module")
def weights(reference, tmp_path_factory) -> str:
    """A file with the reference's tower."""
    path = tmp_path_factory.mktemp("weights") / "tower.pt"
    torch.save({name[2:]: value for name, value in reference.items() if name.startswith("w/")}, path)
    return str(path)


@pytest.mark.parametrize("precision", DTYPES)
def test_features_are_those_of_a_tower_with_converted_weights(reference, weights, precision):
    """The authors convert CLIP's weights to float16 and leave BatchNorm in float32, as open_clip does."""
    tower = build_tower(TOWER, weights)
    convert_weights_to_lp(tower, DTYPES[precision])
    assert tower.conv1.weight.dtype == DTYPES[precision]
    assert tower.bn1.weight.dtype == torch.float32
    with torch.no_grad():
        expected = grid_features(tower, reference["images"].to(DTYPES[precision]))
    features = KCLIP(TOWER, weights, precision=precision).features(reference["images"])
    assert features.dtype == torch.float32
    assert torch.equal(features, expected.float())


@pytest.mark.parametrize(("precision", "share"), [("tf32", 1.0), ("float16", 0.98), ("bfloat16", 0.8)])
def test_most_ids_are_those_of_float32(reference, weights, precision, share):
    """On a CPU, TF32's switches change nothing."""
    codebook = Codebook(reference["centroids"])
    ids = KCLIP(TOWER, weights, codebook, precision=precision)(reference["images"])
    same = (ids == reference["codes"]).float().mean()
    assert same >= share


def lets_tf32() -> bool:
    """Whether convolutions on a GPU may use TF32."""
    if hasattr(torch.backends.cudnn, "conv"):  # not in PyTorch 2.6
        return torch.backends.cudnn.conv.fp32_precision == "tf32"
    return torch.backends.cudnn.allow_tf32


class Switches(nn.Module):
    """Keeps what it is run with; each feature is the sum of a pixel's three channels, three times."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3, 1, 1))
        self.seen = []

    def forward(self, images):
        features = nn.functional.conv2d(images, self.weight)
        self.seen.append((lets_tf32(), features.dtype))
        return features


SEEN = {
    "float32": (False, torch.float32),
    "tf32": (True, torch.float32),
    "float16": (False, torch.float16),
    "bfloat16": (False, torch.bfloat16),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_encoder_runs_so_whatever_the_caller_has_set(precision):
    network = Switches()
    tokenizer = GridKMeans(network, 4, Codebook(np.eye(3, dtype=np.float32)), precision=precision)
    before = lets_tf32()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tokenizer.features(torch.zeros(2, 3, 4, 4)).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
    assert set(network.seen) == {SEEN[precision]}
    assert lets_tf32() == before
    assert network.weight.dtype == torch.float32


# Of commit f5c83c4, before there was a choice.
DIGEST_BEFORE = "1a7f684d37e6d31e2719a8ded5975d7e0ee226818abde7373d442014f715373b"


def test_float32_leaves_no_trace_and_every_other_precision_another_identity(reference, weights):
    plain = Codebook(reference["centroids"])
    assert KCLIP(TOWER, weights, plain).digest == DIGEST_BEFORE
    fitted = Codebook(plain.centroids, KCLIP(TOWER, weights).metadata)
    assert "precision" not in fitted.metadata
    assert KCLIP(TOWER, weights, fitted, precision="float32").digest == fitted.digest == plain.digest
    for codebook in (plain, fitted):
        digests = {KCLIP(TOWER, weights, codebook, precision=precision).digest for precision in PRECISIONS}
        assert len(digests) == 4


def test_a_codebook_is_used_in_another_precision_than_it_names(reference, weights):
    metadata = KCLIP(TOWER, weights, precision="float16").metadata
    assert metadata["precision"] == "float16"
    codebook = Codebook(reference["centroids"], metadata)
    assert torch.equal(KCLIP(TOWER, weights, codebook)(reference["images"]), reference["codes"])


@pytest.mark.parametrize("build", [KCLIP, lambda *args, **options: GridKMeans(Switches(), 4, **options)])
def test_an_unknown_precision_is_refused(build):
    with pytest.raises(TokenizerError, match="float32, tf32, float16, bfloat16"):
        build(TOWER, dict(type="random"), precision="half")
