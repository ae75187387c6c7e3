"""Each digits recipe trains two iterations on the real embedded data, as its config says."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from dataset_converters.digits import write_digits, write_pixel_labels
from digits_tokenizer import few_digits
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner

from mapet_mm.tokenizers.fit_and_extract import run_extract_tokens, run_fit_codebook

CONFIGS = Path(__file__).parents[2] / "configs" / "micro"
# Of recipes that differ in the tokenizer or in the precision alone, one is trained in quick tests.
ALIKE = re.compile(r"_dalle_|_grid_|_vqkd_|linear-mean|^(?!mapet).*-amp-")
RECIPES = [
    pytest.param(path.name, marks=pytest.mark.slow if ALIKE.search(path.name) else ())
    for path in sorted(CONFIGS.glob("*-micro_*.py"))
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """What a recipe reads: digits, pixel labels, and codebook and tokens of 24 digits of each split."""
    root = tmp_path_factory.mktemp("data")
    with few_digits(30):
        write_digits(root / "digits")
        for domain in ("inverted", "rotated"):
            write_digits(root / f"digits_{domain}", domain)
        write_pixel_labels(root / "digits_pixels")
    config = Config.fromfile(CONFIGS / "kclip.py")
    config.tokenizer.codebook = str(root / "codebook.safetensors")
    config.token_store = str(root / "tokens")
    config.data_root = str(root / "digits")
    config.dataloader.num_workers = 0
    for dataset in (*config.dataset, config.codebook.dataset):
        dataset.update(data_root=config.data_root, indices=24)
    _, codebook = run_fit_codebook(config)
    store, _ = run_extract_tokens(config)
    assert store.grid == (6, 6)
    assert store.vocab_size == codebook.k == 128
    return root


def shortened(config: Config, data: Path, work_dir: Path) -> Config:
    """The recipe with its data elsewhere, two iterations long, on a few images."""
    config.work_dir = str(work_dir)
    config.train_cfg = dict(type="IterBasedTrainLoop", max_iters=2, val_interval=2)
    config.default_hooks.checkpoint = dict(type="CheckpointHook", by_epoch=False, interval=2)
    config.default_hooks.logger = dict(type="LoggerHook", interval=1, log_metric_by_epoch=False)
    config.log_processor = dict(by_epoch=False)
    for scheduler in config.param_scheduler:
        scheduler.pop("convert_to_iter_based", None)
    check, *probes = config.get("custom_hooks", [None])
    loaders = [config.train_dataloader, config.val_dataloader, config.test_dataloader]
    for probe in (hook for hook in probes if "train_dataloader" in hook):
        loaders += [probe.train_dataloader, probe.val_dataloader]
        probe.k = 5
    for loader in filter(None, loaders):
        loader.update(num_workers=0, persistent_workers=False)
        loader.dataset.indices = 16  # of the 24 that have tokens
        loader.dataset.data_root = str(data / Path(loader.dataset.data_root).name)
        for transform in loader.dataset.pipeline:
            if transform.type == "mapet_mm.LoadTokenGrid":
                transform.store = str(data / "tokens")
    if check is not None:
        # With probe images, which take a second: once for each pipeline is enough.
        check.alignment = Path(config.filename).stem.startswith(("mapet_vit", "beit"))
        check.codebook = str(data / "codebook.safetensors")
    if config.model.backbone.get("init_cfg"):
        config.model.backbone.init_cfg = None
    return config


class RememberWeights(Hook):
    """Keeps the weights that training starts from, initialised and loaded."""

    def before_train(self, runner: Runner) -> None:
        self.weights = {name: value.clone() for name, value in runner.model.named_parameters()}
        self.frozen = {name for name, value in runner.model.named_parameters() if not value.requires_grad}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_trains_two_iterations(recipe, data, tmp_path):
    config = shortened(Config.fromfile(CONFIGS / recipe), data, tmp_path)
    runner = Runner.from_cfg(config)
    start = RememberWeights()
    runner.register_hook(start)
    runner.train()

    assert runner.iter == 2
    losses, _ = runner.message_hub.get_scalar("train/loss").data
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    checkpoint = torch.load(tmp_path / "iter_2.pth", weights_only=False)["state_dict"]
    layers = {name for name in start.weights if name.startswith("backbone.layers.")}
    frozen = bool(layers) and layers <= start.frozen
    assert frozen == ("linear" in recipe and "scratch" not in recipe)
    for name, value in start.weights.items():
        moved = not torch.equal(checkpoint[name], value)
        # CAE's teacher has no gradient of its own: it follows the encoder.
        assert moved == (name.replace("teacher.", "backbone.") not in start.frozen), name
    if "KNNProbeHook" in str(config.get("custom_hooks")):
        (scalars,) = tmp_path.glob("*/vis_data/scalars.json")
        assert "knn/top1" in scalars.read_text()
    metrics = [key for key in runner.message_hub.log_scalars if key.startswith("val/")]
    assert bool(metrics) == (config.val_cfg is not None), list(runner.message_hub.log_scalars)
    runner.model.train()
    assert runner.model.backbone.training != frozen
