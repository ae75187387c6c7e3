"""The index by which `mapet_mm.hub` makes the recipes models of MMPretrain."""

from config_building import RECIPES, ROOT, index_models, read

METHODS = ("mapet", "pim", "mim", "beit", "cae")


def test_the_index_lists_every_recipe_of_mmpretrain_and_those_that_classify():
    listed = {entry["Config"]: entry["Name"] for entry in index_models() if "Weights" not in entry}
    recipes = [path.relative_to(ROOT) for path in RECIPES if read(path).default_scope == "mmpretrain"]
    recipes = [path for path in recipes if path.parts[1] in METHODS]
    assert sorted(listed) == sorted(map(str, recipes))
    for path in recipes:
        prefix = "mapet_" if "benchmarks" in path.parts else ""
        assert listed[str(path)] == prefix + path.stem
    for entry in index_models():  # `mmpretrain.inference_model` needs the task of a classifier
        tasks = [result["Task"] for result in entry.get("Results", [])]
        assert tasks == ["Image Classification"] * ("benchmarks" in entry["Config"]), entry["Name"]
