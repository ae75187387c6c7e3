"""The methods' metafiles and pages say what their models cost."""

import re

import pytest
import yaml
from config_building import ROOT, read
from flops import complexity

METAFILES = sorted((ROOT / "configs").glob("*/metafile.yml"))
MODELS = {model["Name"]: model for file in METAFILES for model in yaml.safe_load(file.read_text())["Models"]}
# One of each method and size: tokens change nothing. Small ones always, the others with the slow tests.
COSTS: dict[str, list[dict]] = {}
for model in MODELS.values():
    COSTS.setdefault(re.sub("_(kclip(-online|-stored)?|vqkd)_", "_", model["Config"]), []).append(model)
SMALL = re.compile("/(mapet|pim|beit)_vit-tiny-p16_16xb128|benchmarks/vit-tiny")


@pytest.mark.parametrize(
    "models",
    [
        pytest.param(m, id=m[0]["Name"], marks=[] if SMALL.search(c) else pytest.mark.slow)
        for c, m in COSTS.items()
    ],
)
def test_metafiles_say_what_is_counted(models):
    config = models[0]["Config"]
    parameters, forward, step = complexity(read(ROOT / config))
    for model in models:
        costs = model["Metadata"]
        assert (costs["Parameters"], costs["FLOPs"]) == (parameters, forward)
        assert costs.get("Training FLOPs") == step


def test_metafiles_say_the_batch_and_the_length_of_the_recipes_name():
    for model in MODELS.values():
        gpus, batch, length, unit = re.search(r"_(\d+)xb(\d+)-.*?-(\d+)([ek])_", model["Config"]).groups()
        said = model["Metadata"]
        assert said["Batch Size"] == int(gpus) * int(batch)
        assert said == said | ({"Epochs": int(length)} if unit == "e" else {"Iterations": 1000 * int(length)})


@pytest.mark.parametrize("file", METAFILES, ids=lambda file: file.parent.name)
def test_a_methods_page_has_its_metafiles_figures(file):
    costs = {}
    for model in yaml.safe_load(file.read_text())["Models"]:
        said, name = model["Metadata"], model["Config"].rsplit("/", 1)[1]
        flops = f"{said['FLOPs'] / 1e9:.{1 if 'Iterations' in said else 2}f}"
        step = [f"{said['Training FLOPs'] / 1e9:.1f}"] if "Training FLOPs" in said else []
        costs[name] = [f"{said['Parameters'] / 1e6:.1f}", flops, *step]
    page = (file.parent / "README.md").read_text()
    rows = {
        name: cells.split(" | ") for name, cells in re.findall(r"^\| `(\S+\.py)` \| (.*) \|$", page, re.M)
    }
    assert {name: cells[: len(costs[name])] for name, cells in rows.items()} == costs
