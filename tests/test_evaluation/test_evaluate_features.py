"""The tool and its protocols: the same table again, what is said, bad options in one line."""

import json

import pytest
from frozen_features import PROTOCOLS
from mapet_mm.evaluation.declared_images import read_image_sets
from mapet_mm.evaluation.protocol_choice import build_protocols
from pretended_gpu import pretended_gpu
from tiny_training import run_tool

from mapet_mm.evaluation.models import load_checkpoint
from mapet_mm.evaluation.protocol import evaluate


def table(printed: str) -> str:
    return printed[printed.index("protocol ") :]


def test_the_tool_gives_the_same_table_again_from_the_cache(config, root, monkeypatch, capsys):
    arguments = [root / "config.py", root / "weights.pth", "--cache", root / "cache", "--out", root / "out"]
    compare = ["--compare", root / "config.py", "--compare", root / "config.py", root / "weights.pth"]
    run_tool(monkeypatch, "evaluate_features", *arguments, *compare)
    first = table(capsys.readouterr().out)
    rows = json.loads((root / "out" / "results.json").read_text())
    assert list(rows) == ["config, weights", "config", "config, weights (3)"]
    assert rows["config, weights"] == rows["config, weights (3)"]
    protocols = {row["protocol"] for row in rows["config"]}
    assert protocols == {"k-NN", "linear", "linear, BEiT's", "logistic regression", "attentive probe"}
    page = (root / "out" / "report.html").read_text()
    for name in rows:  # each figure has the name that the table has
        assert f"<h2>Linear probe by layer (linear): {name}</h2>" in page
    monkeypatch.setattr("mapet_mm.evaluation.extraction._fill", None)  # nothing is computed again
    monkeypatch.setattr("mapet_mm.evaluation.protocols.linear.train_probes", None)
    run_tool(monkeypatch, "evaluate_features", *arguments, *compare)
    assert table(capsys.readouterr().out) == first


@pytest.mark.parametrize("amp", ["--amp", "--no-amp"])
def test_a_gpu_gives_the_hosts_figures(config, root, monkeypatch, amp):
    """Before: `--amp` on a CPU stopped where a block of the cache has several batches."""

    def figures(device: str) -> dict:
        options = ["--cache", root / f"cache {device}", "--out", root / device, amp]
        run_tool(monkeypatch, "evaluate_features", root / "config.py", root / "weights.pth", *options)
        return json.loads((root / device / "results.json").read_text())

    on_host = figures("host")
    with pretended_gpu():
        assert figures("gpu") == on_host
    features = [*(root / "cache host").glob("*/*/*.safetensors")]
    assert {path.parent.name for path in features} == {"pooled", "tokens"}
    for path in features:
        on_gpu = root / "cache gpu" / path.relative_to(root / "cache host")
        assert on_gpu.read_bytes() == path.read_bytes()


def test_models_that_are_compared_get_the_first_ones_images_and_it_says_so(config, root, monkeypatch, capsys):
    """A model of another size gets images of another size than it was made for."""
    config.evaluation.val.dataset.pipeline.insert(1, dict(type="Resize", scale=32))
    config.dump(root / "other.py")
    arguments = [root / "config.py", "--cache", root / "cache", "--protocols", "NearestNeighbours"]
    run_tool(monkeypatch, "evaluate_features", *arguments, "--compare", root / "other.py")
    note = (
        f"{root}/other.py: its own pipeline of the `val` images is another: all models get those of "
        f"{root}/config.py"
    )
    assert note in capsys.readouterr().out.splitlines()
    run_tool(monkeypatch, "evaluate_features", *arguments, "--compare", root / "config.py")
    assert "is another" not in capsys.readouterr().out


def test_of_several_processes_only_the_first_has_rows_and_says_what_it_does(
    config, root, monkeypatch, capsys
):
    checkpoint, images = load_checkpoint(config, None), read_image_sets(config)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    protocols = build_protocols(PROTOCOLS[:1], images)
    evaluated, rows = evaluate(checkpoint, images, protocols, root / "cache")
    assert (len(evaluated.features["val"]), rows) == (9, [])
    assert not capsys.readouterr().out
    assert not (root / "cache" / "results").exists()


@pytest.fixture
def undeclared(config, root):
    """A config with a test pipeline that names neither image sets nor protocols."""
    config.test_dataloader = config.evaluation.val
    config.pop("evaluation")
    config.dump(root / "config.py")
    return [root / "config.py", root / "weights.pth", "--data", root / "data", "--cache", root / "cache"]


def test_protocols_that_the_labels_do_not_suit_are_left_out_of_the_default(
    undeclared, root, monkeypatch, capsys
):
    """Before: all features were taken, and then the first of them stopped the tool."""
    for split in ("train", "val"):
        (root / "data" / "meta").mkdir(exist_ok=True)
        paths = sorted((root / "data" / split).glob("*/*.png"))
        listed = [str(path.relative_to(root / "data" / split)) for path in paths]
        (root / "data" / "meta" / f"{split}.txt").write_text("\n".join(listed))
    run_tool(monkeypatch, "evaluate_features", *undeclared)
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "have no labels" in line]
    names, reason = line.removeprefix("no ").split(": ", 1)
    labelled = {"NearestNeighbours", "LinearProbes", "BEiTLinearProbes", "LowShot", "AttentiveProbe"}
    assert set(names.split(", ")) == labelled  # in the order in which they were imported
    assert reason == (
        "the `train` images have no labels (one `gt_label` each): name a labelled dataset, or choose "
        "protocols that need none"
    )
    assert {line.split("  ")[0] for line in table(printed).splitlines()[2:]} == {
        "RankMe",
        "patch tokens' norm",
        "patch similarity",
    }
    (root / "cache").rename(root / "another")
    with pytest.raises(SystemExit, match=r"error: the `train` images have no labels"):
        run_tool(monkeypatch, "evaluate_features", *undeclared, "--protocols", "LabelFree", "LowShot")
    assert not (root / "cache").exists()


def test_the_default_k_is_no_larger_than_the_training_set(undeclared, config, root, monkeypatch, capsys):
    """k-NN has 20 neighbours, or those that there are; another k is an option's or the config's."""
    for path in (root / "data/train").glob("*/[1-9].png"):
        path.unlink()
    undeclared += ["--protocols", "NearestNeighbours"]
    run_tool(monkeypatch, "evaluate_features", *undeclared)
    assert "k-NN with k=3, all `train` images" in capsys.readouterr().out.splitlines()
    run_tool(monkeypatch, "evaluate_features", *undeclared, "--cfg-options", "knn_probe.k=3")
    config.evaluation = dict(protocols=[dict(type="NearestNeighbours", k=3)])
    config.dump(root / "declared.py")
    run_tool(monkeypatch, "evaluate_features", root / "declared.py", *undeclared[1:])
    assert len([*(root / "cache/results").glob("NearestNeighbours-*.json")]) == 1
    message = (
        "error: k=4 neighbours of 3 training images: choose 1 to that many: give its entry in "
        "`evaluation.protocols` another `k`, or the default one by `--cfg-options knn_probe.k=3`"
    )
    (root / "cache").rename(root / "another")
    with pytest.raises(SystemExit) as stopped:
        run_tool(monkeypatch, "evaluate_features", *undeclared, "--cfg-options", "knn_probe.k=4")
    assert stopped.value.code == message
    assert not (root / "cache").exists()


def test_unknown_protocols_and_options_are_one_line(config):
    for wrong, match in (
        ("LowShot", r"`protocols` has an entry 'LowShot': give it a dict\(type=...\) in a config"),
        (dict(type="Nearest"), "there is no protocol Nearest: one of .*NearestNeighbours"),
        (dict(type="NearestNeighbours", neighbours=3), "protocol NearestNeighbours: .*'neighbours'"),
        (dict(type="FeaturePictures", images=1), "protocol FeaturePictures: images=1: at least 2"),
        (dict(type="LinearProbes", optimizer="LARS"), "protocol LinearProbes: optimizer='LARS' is none of"),
    ):
        with pytest.raises(Exception, match=match):
            build_protocols([wrong], {})


def test_protocols_run_where_their_images_are(config, root):
    images = read_image_sets(config)
    assert len(build_protocols(PROTOCOLS, images)) == 5
    assert build_protocols(PROTOCOLS, {"dense_train": images["train"]}) == []
    checkpoint = load_checkpoint(config, str(root / "weights.pth"))
    _, rows = evaluate(checkpoint, images, build_protocols(PROTOCOLS[:1], images), root / "cache")
    assert [row.setting for row in rows[0]] == ["class token", "mean", "both"]
    assert not list((root / "cache").glob("*/tokens"))  # which k-NN does not need
