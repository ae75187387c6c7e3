"""k-NN probe: figures in a training that does not notice it, the same in any number of processes."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked_processes import start_together
from mmengine.runner import Runner
from mmpretrain.structures import DataSample
from sklearn.metrics import balanced_accuracy_score
from torch import nn
from torch.utils.data import Dataset
from trainings import build, read_scalars

from mapet_mm.engine.hooks.knn_probe_hook import KNNProbeHook, evaluated_model, take_in_memory, undisturbed
from mapet_mm.evaluation.metrics.neighbours import knn_votes
from mapet_mm.evaluation.tokens import TokenBackbone
from mapet_mm.registry import DATASETS, HOOKS


@DATASETS.register_module()
class TwoColours(Dataset):
    """Noise that is brighter in class 1, with token grids."""

    def __init__(
        self,
        number: int = 24,
        contrast: int = 120,
        labelled: bool = True,
        classes: tuple[str, ...] = (),
        rare: bool = False,
    ) -> None:
        self.number, self.contrast, self.labelled = number, contrast, labelled
        self.every = 7 if rare else 2  # so many images have one of class 1
        self.metainfo = dict(classes=classes)

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict:
        rng = np.random.default_rng(index)
        label = int(index % self.every == 1)
        image = rng.integers(0, 120, (3, 16, 16)) + self.contrast * label
        sample = DataSample(token_grid=rng.integers(0, 8, (4, 4)))
        if self.labelled:
            sample.set_gt_label(label)
        return dict(inputs=torch.from_numpy(image.astype(np.uint8)), data_samples=sample)


def loader(batch_size: int = 5, **dataset) -> dict:
    return dict(batch_size=batch_size, num_workers=0, dataset=dict(type="mapet_mm.TwoColours", **dataset))


PROBE = dict(
    type="mapet_mm.KNNProbeHook", train_dataloader=loader(), val_dataloader=loader(), interval=2, k=3
)


def train(work_dir: Path, hooks: list[dict], **train_cfg) -> Runner:
    options = dict(train_cfg=train_cfg) if train_cfg else {}
    dataset = dict(type="mapet_mm.TwoColours")
    plain = dict(checkpoint=None, sampler_seed=None)
    runner = build(work_dir, batch=8, hooks=plain, dataset=dataset, custom_hooks=hooks, **options)
    runner.train()
    return runner


def in_processes(number: int, function: Callable, folder: Path) -> list:
    """Results of `function` in the processes of a group, forked: nothing of it takes a gradient."""

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        torch.save(function(), folder / f"result_{rank}.pt")

    start_together(number, work)
    return [torch.load(folder / f"result_{rank}.pt") for rank in range(number)]


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Runner:
    return train(tmp_path_factory.mktemp("run"), [])


def figures(hook: dict, runner: Runner) -> dict[str, float]:
    """The values that a hook would log of the runner's model."""
    hook = HOOKS.build(hook)
    hook.datasets = hook.build_datasets(runner)
    with undisturbed(model := evaluated_model(runner)):
        return hook.figures(TokenBackbone(model), hook.build_loaders(runner))


def test_training_goes_on_as_if_there_were_no_probe(runner, tmp_path):
    probed = train(tmp_path, [PROBE])
    for one, two in zip(runner.model.parameters(), probed.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert probed.model.training
    assert probed.model.backbone.training
    probes = {record["step"]: record["knn/top1"] for record in read_scalars(tmp_path) if "knn/top1" in record}
    # Dark and bright images are told apart by any features; an image is its own nearest neighbour too.
    assert probes == {2: 100.0, 3: 100.0}


def test_a_rare_class_counts_as_the_other(runner):
    """Of 24 dark images and 4 bright ones that no feature tells apart, over images all would be dark."""
    sets = [loader(number=number, contrast=2, rare=True) for number in (28, 27)]
    hook = dict(PROBE, train_dataloader=sets[0], val_dataloader=sets[1], k=20)
    found = figures(hook, runner)
    assert list(found) == ["knn/mean_per_class", "knn/rank_me"]
    built_hook = HOOKS.build(hook)
    with undisturbed(runner.model):
        built_hook.before_train(runner)
        built = built_hook.build_loaders(runner)
        known, (queries, labels) = (take_in_memory(TokenBackbone(runner.model), one, True) for one in built)
    votes = knn_votes(queries, [known], 2, k=20) / torch.tensor([24, 4])
    expected = 100 * balanced_accuracy_score(labels, votes.argmax(1))
    assert found["knn/mean_per_class"] == pytest.approx(expected)


def test_a_training_of_iterations_is_probed_at_its_last_one(tmp_path):
    train(tmp_path, [PROBE], by_epoch=False, max_iters=5)
    (record,) = [line for line in read_scalars(tmp_path) if "knn/top1" in line]
    assert (record["step"], record["knn/top1"]) == (5, 100.0)


def best_of(work_dir: Path) -> dict:
    return torch.load(work_dir / "best_knn.pth", weights_only=True)


@pytest.mark.parametrize("averaged", [False, True])
def test_the_weights_of_the_best_probe_are_kept_beside_the_checkpoints(averaged, tmp_path, monkeypatch):
    """Those that were measured; of equals the first; a resumed training knows how good they were."""
    found = iter([40.0, 60.0, 60.0, 50.0, 70.0])
    monkeypatch.setattr(KNNProbeHook, "figures", lambda *_: {"knn/top1": next(found)})
    probe = dict(PROBE, interval=1)
    average = [dict(type="EMAHook", momentum=0.1)] if averaged else []
    options = dict(batch=8, dataset=dict(type="mapet_mm.TwoColours"), custom_hooks=[*average, probe])
    checkpoint = dict(type="CheckpointHook", interval=1)
    hooks = dict(portable_checkpoint=dict(type="mapet_mm.PortableCheckpointHook"), checkpoint=checkpoint)
    build(tmp_path, hooks=hooks, **options).train()
    best = best_of(tmp_path)
    assert (best["meta"]["epoch"], best.keys() & {"optimizer", "param_schedulers"}) == (2, set())
    second = torch.load(tmp_path / "epoch_2.pth", weights_only=True)
    for name, value in second["state_dict"].items():
        assert torch.equal(value, best["state_dict"][name])
    assert Path((tmp_path / "last_checkpoint").read_text()).name == "epoch_3.pth"
    lines = [line for path in tmp_path.glob("*/*.log") for line in path.read_text().splitlines()]
    probes = [line for line in lines if "(knn)" in line]
    assert [line.endswith("(the best so far: best_knn.pth)") for line in probes] == [True, True, False]
    for epochs, best_epoch in ((4, 2), (5, 5)):
        longer = dict(train_cfg=dict(by_epoch=True, max_epochs=epochs), sampler="DefaultSampler", resume=True)
        build(tmp_path, hooks=hooks, **options, **longer).train()
        assert best_of(tmp_path)["meta"]["epoch"] == best_epoch


def test_a_training_that_writes_no_checkpoints_keeps_none(tmp_path):
    train(tmp_path, [PROBE])
    assert not list(tmp_path.rglob("*.pth"))


AVERAGES = [
    (dict(type="EMAHook"), True),
    (dict(type="mmengine.EMAHook"), True),
    (dict(type="EMAHook", evaluate_on_ema=False, evaluate_on_origin=True), False),
]


@pytest.mark.parametrize(("hook", "averaged"), AVERAGES)
def test_weights_are_those_of_a_validation(hook, averaged, tmp_path):
    runner = train(tmp_path, [dict(hook, momentum=0.1)])
    for parameter in runner.model.parameters():
        parameter.data.fill_(torch.nan)
    assert math.isfinite(figures(PROBE, runner)["knn/rank_me"]) == averaged


def absent(folder: Path) -> dict:
    """A loader of a folder that is not there, as a recipe's ImageNet for those who have none."""
    return dict(batch_size=5, num_workers=0, dataset=dict(type="ImageNet", data_root=str(folder / "none")))


def listed(folder: Path) -> dict:
    """A loader of images whose list is there, and whose files are gone."""
    (folder / "list.txt").write_text("gone.png 0\n")
    dataset = dict(
        type="CustomDataset",
        ann_file=str(folder / "list.txt"),
        data_prefix=str(folder),
        pipeline=[dict(type="LoadImageFromFile"), dict(type="PackInputs")],
    )
    return dict(batch_size=5, num_workers=0, dataset=dataset)


@pytest.mark.parametrize(
    ("images", "words"),
    [(lambda _: loader(labelled=False), "no labels"), (absent, "none"), (listed, "gone.png")],
)
def test_images_without_labels_or_files_stop_no_training_and_are_named_at_its_start(images, words, tmp_path):
    found = images(tmp_path)
    runner = train(tmp_path, [dict(PROBE, train_dataloader=found, val_dataloader=found)])
    assert runner.epoch == runner.max_epochs
    assert not [record for record in read_scalars(tmp_path) if "knn/top1" in record]
    (log,) = tmp_path.glob("*/*.log")
    (line,) = [line for line in log.read_text().splitlines() if "no k-NN during the training" in line]
    assert words in line


def test_classes_of_another_order_are_warned_of(tmp_path):
    """The training goes on: only the probe's figures need classes."""
    loaders = [loader(classes=names) for names in (("dark", "bright"), ("bright",))]
    train(tmp_path, [dict(PROBE, train_dataloader=loaders[0], val_dataloader=loaders[1])])
    (log,) = tmp_path.glob("*/*.log")
    assert "the k-NN figures are wrong: class `bright` is number 0 in the probe's images" in log.read_text()


def test_features_are_the_plain_vits_patch_means_in_evaluation_mode(runner):
    """In float32 on a CPU; each image once although its loader shuffles."""
    shuffled = dict(loader(), drop_last=True, sampler=dict(type="DefaultSampler", shuffle=True))
    hook = KNNProbeHook(shuffled, shuffled)
    hook.before_train(runner)
    with undisturbed(runner.model):
        built = hook.build_loaders(runner)[0]
        features, labels = take_in_memory(TokenBackbone(runner.model), built, everywhere=True)
        images = torch.stack([TwoColours()[i]["inputs"] for i in range(24)]).float()
        tokens = runner.model.extract_feat((images - 128) / 64)[-1]
    torch.testing.assert_close(features, tokens[:, 1:].mean(1), rtol=1e-5, atol=1e-5)
    assert labels.tolist() == [0, 1] * 12


@pytest.mark.parametrize(("images", "queries"), [(24, 23), (11, 2), (5, 1)])
def test_a_probe_in_several_processes_equals_one_process(runner, tmp_path, images, queries):
    sets = [loader(2, number=number, contrast=2) for number in (images, queries)]
    hook = dict(PROBE, train_dataloader=sets[0], val_dataloader=sets[1])

    def probe() -> float:
        return figures(hook, runner)["knn/top1"]

    with undisturbed(runner.model):
        built_hook = HOOKS.build(hook)
        built_hook.before_train(runner)
        built = built_hook.build_loaders(runner)
        known, (queries, labels) = (take_in_memory(TokenBackbone(runner.model), one, True) for one in built)
    right = knn_votes(queries, [known], 2, k=3).argmax(1) == labels
    for number in (1, 2, 3):
        expected = pytest.approx(100 * right.float().mean().item())
        assert in_processes(number, probe, tmp_path) == [expected] * number


def test_voting_images_without_a_label_are_refused(runner):
    with pytest.raises(ValueError, match="one label"):
        figures(dict(PROBE, train_dataloader=loader(labelled=False)), runner)


def test_a_probe_compiles_nothing():
    """Its batches' shapes would count against PyTorch's limit, and take minutes each."""

    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    torch._dynamo.reset()
    graphs, model = [], Doubling()
    model.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    with undisturbed(model):
        model(torch.ones(3, 2))
    assert not graphs
    model(torch.ones(3, 2))
    assert len(graphs) == 1


def test_a_probe_of_some_images_takes_them_evenly_spaced():
    """Of a list in order of the classes, the first ones would be of one class."""

    class Images(list):
        def get_subset_(self, indices: list[int]) -> None:
            self[:] = [self[index] for index in indices]

    loaders = [dict(loader(), dataset=Images(range(length))) for length in (10, 4)]
    hook = KNNProbeHook(*loaders, most_images=4)
    runner = SimpleNamespace(train_dataloader=SimpleNamespace(dataset=TwoColours()))
    assert hook.build_datasets(runner) == [[0, 3, 6, 9], [0, 1, 2, 3]]
