"""k-NN probe: votes by hand and by scikit-learn, any model's features, a training that does not notice it."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from mapet_mm.evaluation.image_features import build_loader, image_features, normalise, pool, undisturbed
from mmengine.dataset import DefaultSampler
from mmengine.dist import get_rank
from mmengine.model import ImgDataPreprocessor
from mmengine.runner import Runner
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torch.utils.data import Dataset

from mapet_mm.engine.hooks import knn_probe_hook as knn
from mapet_mm.engine.hooks.knn_probe_hook import KNNProbeHook, knn_predict
from mapet_mm.registry import DATASETS

ARCH = dict(embed_dims=24, num_layers=2, num_heads=3, feedforward_channels=48)


def test_votes_by_hand():
    """Two weak neighbours of class 1 outvote a nearer one of class 0 only at a high temperature."""
    train = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.8, -0.6], [-1.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 0])
    query = torch.tensor([[2.0, 0.0]])
    assert knn_predict(train, labels, query, 2, k=1, temperature=0.07).tolist() == [0]
    assert knn_predict(train, labels, query, 2, k=3, temperature=0.07).tolist() == [0]  # e^14.3 > 2 e^11.4
    assert knn_predict(train, labels, query, 2, k=3, temperature=1.0).tolist() == [1]  # e^1 < 2 e^0.8


def test_votes_at_a_low_temperature_are_finite():
    """e^100 is beyond float32: both classes had infinite votes, and the lower one won."""
    train = torch.tensor([[0.999, 0.0447], [1.0, 0.0]])
    arguments = train, torch.tensor([0, 1]), torch.tensor([[1.0, 0.0]]), 2
    for temperature in (0.07, 0.01, 1e-6):
        assert knn_predict(*arguments, k=2, temperature=temperature).tolist() == [1]


@pytest.mark.parametrize("offset", [0, 1000, 100_000])
def test_features_far_from_the_origin_have_the_neighbours_of_float64(offset):
    """Their cosines differ from the 6th or 10th digit on, of which products in float32 have 7."""
    rng = np.random.default_rng(0)
    train, queries = (rng.normal(size=(size, 16)).astype(np.float32) + offset for size in (400, 200))
    unit = [x / np.linalg.norm(x.astype(float), axis=1, keepdims=True) for x in (train, queries)]
    nearest = (unit[1] @ unit[0].T).argmax(1)
    labels = np.arange(400)  # a class an image: the prediction is the neighbour
    found = knn_predict(*map(torch.from_numpy, (train, labels, queries)), 400, k=1)
    assert (found.numpy() == nearest).mean() > 0.99


def test_a_feature_of_zero_is_like_none():
    """Nearer than those of the other direction, farther than those of the same half."""
    train, labels = torch.tensor([[0.0, 0.0], [0.1, 1.0], [-1.0, 0.0]]), torch.arange(3)
    query = torch.tensor([[1.0, 0.0], [-3.0, -1.0]])
    assert knn_predict(train, labels, query, 3, k=1).tolist() == [1, 2]
    assert knn_predict(train[[0, 2]], labels[:2], query, 2, k=1).tolist() == [0, 1]
    # exp(0) of the zero less exp(-1) of the other direction, twice.
    assert knn_predict(train[[0, 2, 2]], labels[[0, 1, 1]], query[:1], 2, k=3, temperature=1.4).tolist() == [
        0
    ]
    assert knn_predict(train[[0, 2, 2]], labels[[0, 1, 1]], query[:1], 2, k=3, temperature=1.5).tolist() == [
        1
    ]


@pytest.mark.parametrize("temperature", [0, -0.07, float("nan")])
def test_a_temperature_that_is_not_above_0_is_refused(temperature):
    message = f"temperature={temperature} of k-NN's votes: choose a number above 0"
    with pytest.raises(ValueError, match=message):
        knn_predict(torch.eye(2), torch.arange(2), torch.eye(2), 2, k=1, temperature=temperature)
    with pytest.raises(ValueError, match=message):
        KNNProbeHook({}, {}, temperature=temperature)


def test_equals_scikit_learns_classifier_with_the_same_weights(monkeypatch):
    """In one chunk and in many: memory is bounded, results are the same."""
    rng = np.random.default_rng(0)
    train, queries = (rng.normal(size=(size, 8)).astype(np.float32) for size in (200, 90))
    labels = rng.integers(0, 5, 200)

    def unit(x):
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    # On the unit sphere the squared distance is 2 - 2 cosine.
    reference = KNeighborsClassifier(7, weights=lambda distance: np.exp((1 - distance**2 / 2) / 0.07))
    expected = reference.fit(unit(train), labels).predict(unit(queries))
    arguments = torch.from_numpy(train), torch.from_numpy(labels), torch.from_numpy(queries), 5
    np.testing.assert_array_equal(knn_predict(*arguments, k=7).numpy(), expected)
    for rows, columns in ((7, 200), (90, 64), (13, 5)):
        monkeypatch.setattr(knn, "tile", lambda device, rows=rows, columns=columns: (rows, columns))
        np.testing.assert_array_equal(knn_predict(*arguments, k=7).numpy(), expected)


def test_similarities_take_little_of_a_gpus_memory(monkeypatch):
    memory = 80 * 2**30
    properties = SimpleNamespace(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    rows, columns = knn.tile(torch.device("cuda"))
    assert memory / 128 < 4 * rows * columns <= memory / 64
    properties.total_memory = 2**20
    assert knn.tile(torch.device("cuda")) == (4096, 4096)


def test_more_neighbours_than_images_are_refused():
    with pytest.raises(ValueError, match="k=5 neighbours of 4 training images"):
        knn_predict(torch.eye(4), torch.arange(4), torch.eye(4), 4, k=5)


def test_pooling_takes_patches_or_class_token():
    tokens = torch.arange(12.0).view(1, 4, 3)  # B N D
    assert pool(tokens, "mean").tolist() == [[6.0, 7.0, 8.0]]
    assert pool(tokens, "class token").tolist() == [[0.0, 1.0, 2.0]]
    assert pool(tokens[:, 0], "mean").tolist() == [[0.0, 1.0, 2.0]]
    with pytest.raises(ValueError, match="pooling='max' is none of mean, class token"):
        KNNProbeHook({}, {}, pooling="max")


@pytest.mark.parametrize("kind", ["SelfSupDataPreprocessor", "mapet_mm.TokenGridDataPreprocessor"])
def test_images_are_normalised_as_the_model_does(kind):
    config = dict(type=kind, mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0], to_rgb=True)
    preprocessor = MODELS.build(config)
    images = torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8)
    samples = [DataSample(token_grid=np.zeros((1, 1), int)) for _ in images]
    expected = preprocessor(dict(inputs=images, data_samples=samples))["inputs"]
    expected = expected[0] if isinstance(expected, list) else expected
    torch.testing.assert_close(normalise(preprocessor, images), expected)


class OriginalSegDataPreProcessor(nn.Module):
    """What the original MMSegmentation's keeps of its arguments (the maintained one's has an underscore)."""

    def __init__(self, bgr_to_rgb: bool) -> None:
        super().__init__()
        self.channel_conversion = bgr_to_rgb


@pytest.mark.parametrize("swap", [False, True])
def test_the_channels_are_swapped_where_the_host_library_swaps_them(swap):
    preprocessors = [
        MODELS.build(dict(type="mmpretrain.ClsDataPreprocessor", to_rgb=swap)),
        MODELS.build(dict(type="mmpretrain.SelfSupDataPreprocessor", rgb_to_bgr=swap)),
        ImgDataPreprocessor(bgr_to_rgb=swap),
        OriginalSegDataPreProcessor(bgr_to_rgb=swap),
    ]
    images = torch.arange(12.0).view(1, 3, 2, 2)
    for preprocessor in preprocessors:
        assert torch.equal(normalise(preprocessor, images), images.flip(1) if swap else images)
    assert torch.equal(normalise(nn.Identity(), images), images)


@DATASETS.register_module()
class TwoColours(Dataset):
    """Noise that is brighter in class 1, with token grids."""

    def __init__(
        self, number: int = 24, contrast: int = 120, labelled: bool = True, classes: tuple[str, ...] = ()
    ) -> None:
        self.number, self.contrast, self.labelled = number, contrast, labelled
        self.metainfo = dict(classes=classes)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict:
        rng = np.random.default_rng(index)
        image = rng.integers(0, 120, (3, 16, 16)) + self.contrast * (index % 2)
        sample = DataSample(token_grid=rng.integers(0, 8, (4, 4)))
        if self.labelled:
            sample.set_gt_label(index % 2)
        return dict(inputs=torch.from_numpy(image.astype(np.uint8)), data_samples=sample)


def train(work_dir, hooks: list[dict], **train_cfg) -> Runner:
    backbone = dict(type="mapet_mm.MaPeTPretrainViT", arch=ARCH, img_size=16, patch_size=4, cutting_point=5)
    runner = Runner(
        model=dict(
            type="mapet_mm.MaPeT",
            backbone=dict(drop_path_rate=0.2, **backbone),
            head=dict(type="mapet_mm.TokenPredictionHead", embed_dims=24, vocab_size=8),
            target_generator=dict(type="mapet_mm.PrecomputedTokens", vocab_size=8),
            data_preprocessor=dict(type="mapet_mm.TokenGridDataPreprocessor", mean=[128.0], std=[64.0]),
        ),
        work_dir=str(work_dir),
        train_dataloader=dict(
            batch_size=8,
            num_workers=0,
            sampler=dict(type="DefaultSampler", shuffle=True),
            dataset=dict(type="mapet_mm.TwoColours"),
            collate_fn=dict(type="default_collate"),
        ),
        train_cfg=train_cfg or dict(by_epoch=True, max_epochs=3),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3)),
        default_hooks=dict(checkpoint=None, sampler_seed=None),
        custom_hooks=hooks,
        randomness=dict(seed=3),
        default_scope="mmpretrain",
        experiment_name=str(work_dir),
    )
    runner.train()
    return runner


PROBE = dict(
    type="mapet_mm.KNNProbeHook",
    train_dataloader=dict(batch_size=5, num_workers=0, dataset=dict(type="mapet_mm.TwoColours")),
    val_dataloader=dict(batch_size=5, num_workers=0, dataset=dict(type="mapet_mm.TwoColours")),
    interval=2,
    k=3,
)


def test_training_goes_on_as_if_there_were_no_probe(tmp_path):
    """Bit-equal weights with and without; probes after epoch 2 and after the last, in the scalars."""
    without, probed = train(tmp_path / "without", []), train(tmp_path / "with", [PROBE])
    for one, two in zip(without.model.parameters(), probed.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert probed.model.training
    assert probed.model.backbone.training
    (file,) = (tmp_path / "with").glob("*/vis_data/scalars.json")
    logged = [json.loads(line) for line in file.read_text().splitlines()]
    probes = {record["step"]: record["knn/top1"] for record in logged if "knn/top1" in record}
    # Dark and bright images are told apart by any features; an image is its own nearest neighbour too.
    assert probes == {2: 100.0, 3: 100.0}


def test_a_training_of_iterations_is_probed_at_its_last_one(tmp_path):
    train(tmp_path / "run", [PROBE], by_epoch=False, max_iters=5)
    (file,) = (tmp_path / "run").glob("*/vis_data/scalars.json")
    (record,) = [line for line in map(json.loads, file.read_text().splitlines()) if "knn/top1" in line]
    assert (record["step"], record["knn/top1"]) == (5, 100.0)
    (log,) = (tmp_path / "run").glob("*/*.log")
    assert "Iter(knn) [5]  knn/top1: 100.0000" in log.read_text()


@pytest.mark.parametrize("averaging", ["EMAHook", "mmengine.EMAHook", "not in validation"])
def test_weights_are_those_of_a_validation(averaging, tmp_path):
    """Before: without the average that validations and checkpoints have."""
    ema = dict(type=averaging, momentum=0.1)
    if averaging == "not in validation":
        ema.update(type="EMAHook", evaluate_on_ema=False, evaluate_on_origin=True)
    runner = train(tmp_path / "run", [ema])
    hook = KNNProbeHook(**{key: value for key, value in PROBE.items() if key != "type"})
    found = hook.figures(runner)["knn/rank_me"]
    raw = copy.deepcopy(runner.model.state_dict())
    runner.call_hook("before_val_epoch")
    runner._hooks = []
    assert hook.figures(runner)["knn/rank_me"] == found
    runner.model.load_state_dict(raw)
    same = averaging == "not in validation"
    assert (hook.figures(runner)["knn/rank_me"] == found) == same


def test_images_without_labels_are_trained_on_and_not_probed(tmp_path):
    unlabelled = dict(batch_size=5, num_workers=0, dataset=dict(type="mapet_mm.TwoColours", labelled=False))
    train(tmp_path / "run", [dict(PROBE, train_dataloader=unlabelled, val_dataloader=unlabelled)])
    (file,) = (tmp_path / "run").glob("*/vis_data/scalars.json")
    assert "loss" in file.read_text()
    assert "knn" not in file.read_text()
    (log,) = (tmp_path / "run").glob("*/*.log")
    assert log.read_text().count("the images have no labels: no k-NN probe") == 2  # where a probe is due


def test_classes_of_another_order_are_warned_of(tmp_path):
    """The training goes on: only the probe's figures need classes."""
    sets = [dict(type="mapet_mm.TwoColours", classes=names) for names in (("dark", "bright"), ("bright",))]
    loaders = [dict(batch_size=5, num_workers=0, dataset=one) for one in sets]
    train(tmp_path / "run", [dict(PROBE, train_dataloader=loaders[0], val_dataloader=loaders[1])])
    (log,) = (tmp_path / "run").glob("*/*.log")
    line = "the k-NN figures are wrong: class `bright` is number 0 in the probe's images and number 1 in the"
    assert log.read_text().count(line) == 1  # of two probes


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Runner:
    return train(tmp_path_factory.mktemp("run"), [])


def test_features_are_those_of_the_plain_vit_in_evaluation_mode(runner):
    hook = KNNProbeHook(**{key: value for key, value in PROBE.items() if key != "type"})
    with undisturbed(runner.model):
        features, labels = image_features(runner.model, build_loader(hook.loaders[0]))
        images = torch.stack([TwoColours()[i]["inputs"] for i in range(24)]).float()
        expected = runner.model.extract_feat((images - 128) / 64)[-1][:, 1:].mean(1)
    torch.testing.assert_close(features, expected, rtol=1e-5, atol=1e-5)
    assert labels.tolist() == [0, 1] * 12


def in_processes(number: int, function: Callable, folder: Path) -> list:
    """Results of `function` in the processes of a group. Forked: nothing of it takes a gradient."""

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        meeting = f"file://{folder}/meeting of {number}"
        torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=number)
        torch.save(function(), folder / f"result_{rank}.pt")

    mp.start_processes(run, nprocs=number, start_method="fork")
    return [torch.load(folder / f"result_{rank}.pt") for rank in range(number)]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("k", [1, 7, 20])
def test_neighbours_divided_among_processes_predict_the_same(number, k, monkeypatch, tmp_path):
    """200 training images in ragged shares, one of which has fewer than k."""
    generator = torch.Generator().manual_seed(0)
    train, queries = (torch.randn(size, 8, generator=generator) for size in (200, 90))
    labels = torch.randint(5, (200,), generator=generator)
    expected = knn_predict(train, labels, queries, 5, k)
    cuts = {1: [200], 2: [195, 5], 3: [100, 97, 3]}[number]
    monkeypatch.setattr(knn, "tile", lambda device: (31, 64))

    def predict() -> torch.Tensor:
        shares = zip(train.split(cuts), labels.split(cuts), strict=True)
        features, own = list(shares)[get_rank()]
        return knn_predict(features, own, queries, 5, k).tolist()

    assert in_processes(number, predict, tmp_path) == [expected.tolist()] * number


@pytest.mark.parametrize(("images", "queries"), [(24, 23), (11, 2), (5, 1)])
def test_a_probe_in_several_processes_equals_one_process(runner, tmp_path, images, queries):
    """As many images as processes, more, or fewer: each counts once."""
    sets = [dict(type="mapet_mm.TwoColours", number=number, contrast=2) for number in (images, queries)]
    loaders = [dict(batch_size=2, num_workers=0, dataset=dataset) for dataset in sets]

    def probe() -> float:
        return KNNProbeHook(*loaders, k=3).probe(runner)

    with undisturbed(runner.model):
        (features, labels), (others, truth) = (
            image_features(runner.model, build_loader(loader)) for loader in loaders
        )
    assert len(features) == images
    expected = 100 * (knn_predict(features, labels, others, 2, 3) == truth).float().mean().item()
    for number in (1, 2, 3):
        assert in_processes(number, probe, tmp_path) == [pytest.approx(expected)] * number


def test_samplers_that_leave_images_out_or_repeat_them_are_refused():
    for sampler in (dict(type="DefaultSampler", shuffle=True), dict(type=DefaultSampler), None):
        loader = dict(PROBE["val_dataloader"], sampler=sampler)
        KNNProbeHook(loader, loader)
    loader = dict(PROBE["val_dataloader"], sampler=dict(type="InfiniteSampler"))
    with pytest.raises(ValueError, match=r"each image once: leave `sampler` \(InfiniteSampler\)"):
        KNNProbeHook(PROBE["val_dataloader"], loader)


def test_shuffled_loaders_that_drop_the_last_batch_still_count_each_image_once():
    loader = dict(PROBE["val_dataloader"], drop_last=True, sampler=dict(type="DefaultSampler", shuffle=True))
    built = build_loader(loader)
    assert [int(sample.gt_label) for batch in built for sample in batch["data_samples"]] == [0, 1] * 12


@pytest.mark.parametrize("amp", [None, True])
def test_features_are_taken_in_autocast_where_asked_for(amp):
    """On CPU by default in float32; in float32 they arrive, and are compared."""
    seen = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.data_preprocessor = nn.Identity()  # which normalises nothing
            self.linear = nn.Linear(16, 4)

        def extract_feat(self, images: torch.Tensor) -> list[torch.Tensor]:
            seen.append(self.linear(images[:, 0, 0]))
            return seen[-1:]

    features, _ = image_features(Model(), build_loader(PROBE["val_dataloader"]), amp=amp)
    assert {output.dtype for output in seen} == {torch.bfloat16 if amp else torch.float32}
    assert features.dtype == torch.float32


def test_images_without_a_label_or_with_several_are_refused(monkeypatch):
    model = nn.Module()
    model.weight, model.data_preprocessor = nn.Parameter(torch.zeros(1)), nn.Module()
    model.extract_feat = lambda images: [images.flatten(1)]
    for label in (None, [0, 1]):
        sample = DataSample() if label is None else DataSample().set_gt_label(label)
        monkeypatch.setattr(
            TwoColours, "__getitem__", lambda *_, s=sample: dict(inputs=torch.zeros(3, 4, 4), data_samples=s)
        )
        with pytest.raises(ValueError, match="one label an image is needed"):
            image_features(model, build_loader(PROBE["val_dataloader"]))


def test_an_empty_set_is_refused():
    loader = dict(batch_size=2, num_workers=0, dataset=dict(type="mapet_mm.TwoColours", number=0))
    with pytest.raises(ValueError, match="TwoColours has no images"):
        build_loader(loader)


def test_a_probe_compiles_nothing():
    """Its batches' shapes would count against PyTorch's limit, and take minutes each."""
    torch._dynamo.reset()
    graphs = []

    def counted(graph, _):
        graphs.append(graph)
        return graph.forward

    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    model = Doubling()
    model.compile(backend=counted, fullgraph=True, dynamic=False)
    with undisturbed(model):
        for size in range(2, 14):
            model(torch.ones(size))
    assert not graphs
    model(torch.ones(2))
    assert len(graphs) == 1
