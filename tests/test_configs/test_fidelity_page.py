"""docs/fidelity.md is true: every `key=value` of its tables holds in every recipe that it names."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from config_building import ROOT, load

PAGE = (ROOT / "docs/fidelity.md").read_text()
SIZES = {"T": "vit-tiny", "S": "vit-small", "B": "vit-base"}
PIPELINES = {"train": "train_dataloader.dataset.pipeline", "val": "val_dataloader.dataset.pipeline"}
CLAIM = re.compile(r"(?:\b([TSB]): )?`([a-z_]+(?:\.[\w-]+)*)=([^`]+)`")

read = cache(load)


def sections() -> list[tuple[str, list[Path], list[tuple[str, str, str]]]]:
    """Heading, recipes and claims (size or nothing, key, value) of each section with a table of recipes."""
    found = []
    for part in re.split(r"^#+ ", PAGE, flags=re.MULTILINE)[1:]:
        if recipes := re.search(r"^Recipes: `(.+)`$", part, re.MULTILINE):
            paths = sorted(ROOT.glob(recipes[1]))
            cells = [line.split("|")[4] for line in part.splitlines() if line.startswith("|")]
            found.append((part.splitlines()[0], paths, CLAIM.findall("\n".join(cells))))
    return found


SECTIONS = sections()
# Recipes and claims of each section, in the page's order.
COUNTS = [
    (6, 25),
    (3, 34),
    (3, 15),
    (3, 6),
    (3, 14),
    (1, 10),
    (1, 3),
    (1, 3),
    (6, 3),
    (6, 2),
    (6, 4),
    (6, 5),
    (6, 16),
]


def value_of(config, key: str) -> object:
    """The value at a dotted key; in a list a part is the type of one of its items."""
    first, _, rest = key.partition(".")
    for part in f"{PIPELINES.get(first, first)}.{rest}".rstrip(".").split("."):
        if isinstance(config, list):
            (config,) = (one for one in config if one["type"].split(".")[-1] == part)
        else:
            config = config[part]
    return config


@pytest.mark.parametrize(("heading", "paths", "claims"), SECTIONS, ids=[section[0] for section in SECTIONS])
def test_every_value_of_a_table_is_that_of_its_recipes(heading, paths, claims):
    assert paths, heading
    assert claims, heading
    for path in paths:
        for size, key, text in claims:
            if size and SIZES[size] not in path.stem:
                continue
            actual, stated = value_of(read(path), key), ast.literal_eval(text)
            if isinstance(stated, tuple):  # a config may hold it as a list
                actual = tuple(actual)
            expected = pytest.approx(stated) if isinstance(stated, float) else stated
            assert actual == expected, (path.stem, key)


def test_the_page_covers_every_experiment():
    """A pattern that loses recipes, or a span that is not read, shows here."""
    assert [(len(paths), len(claims)) for _, paths, claims in SECTIONS] == COUNTS
