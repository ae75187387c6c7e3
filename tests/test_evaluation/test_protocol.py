"""Protocols are chosen by config; their results are kept, named and told apart."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from clustered_features import evaluated_clusters
from mapet_mm.evaluation.protocol_choice import build_protocols

from mapet_mm.evaluation.protocol import (
    PROTOCOLS,
    Evaluated,
    Protocol,
    Row,
    _rows,
    results_table,
    tell_apart,
)
from mapet_mm.evaluation.protocols.knn import NearestNeighbours
from mapet_mm.evaluation.protocols.low_shot import LowShot, share_name
from mapet_mm.utils.errors import UserError


def test_a_figure_that_a_checkpoint_does_not_have_leaves_its_cell_empty():
    """Of a backbone without a class token, beside one with it."""
    rows = [Row("k-NN", "class token", 93.25), Row("k-NN", "mean", 0.0123, spread=1.26, note="x")]
    table = results_table({"a": rows, "b": rows[1:]})
    assert [line[3:] for line in table.rows] == [["93.2", None], ["0.012 ± 1.3 (x)", "0.012 ± 1.3 (x)"]]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(k=3), "`protocols` has an entry {'k': 3} without a `type`: name one of "),
        (
            dict(type="NearestNeighbours", temperature=0),
            "temperature=0 of k-NN's votes: choose a number above",
        ),
        (dict(type="LinearProbes", poolings=["cls"]), "['cls']: a list of some of class token, mean, both"),
        (dict(type="LinearProbes", rates=[]), "LinearProbes: rates=[]: at least one learning rate"),
        (dict(type="AttentiveProbe", rates=[]), "AttentiveProbe: rates=[]: at least one learning rate"),
        (dict(type="LowShot", pooling="cls"), "pooling='cls' is none of class token, mean, both"),
        (dict(type="LowShot", shots=[0]), "shots: 0 is neither a whole number of images nor a share below 1"),
        (dict(type="LowShot", shots=[1.5]), "shots: 1.5 is neither a whole number of images nor a share"),
        (dict(type="LowShot", shots=[1, 1]), "shots=[1, 1]: one stands there twice"),
        (dict(type="LowShot", draws=0), "draws=0: images are drawn once at least"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(config, message):
    with pytest.raises(UserError) as error:
        build_protocols([config], {})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_shares_are_named_so_that_they_stay_apart():
    names = [share_name(share) for share in (0.001, 0.004, 0.01, 0.1, 5)]
    assert names == [
        "0.1% of the images",
        "0.4% of the images",
        "1% of the images",
        "10% of the images",
        "5 a class",
    ]


PROTOCOL = """
from mapet_mm.evaluation.protocol import Protocol, Row

class Own(Protocol):
    def run(self, evaluated):
        return [Row("own", "all", VALUE)]
"""


def test_a_protocol_that_is_being_written_is_run_anew(tmp_path, monkeypatch):
    """Its file has changed: the stored figure is that of before. Unchanged it is not run again."""
    monkeypatch.syspath_prepend(tmp_path)
    evaluated = Evaluated(
        None, {name: SimpleNamespace(folder=tmp_path) for name in ("train", "val")}, {}, "cpu"
    )
    figures = []
    for value in ("1.0", "2.00"):  # of other sizes, or Python would take its bytecode of the first
        (tmp_path / "own_protocol.py").write_text(PROTOCOL.replace("VALUE", value))
        sys.modules.pop("own_protocol", None)
        own = importlib.import_module("own_protocol").Own
        figures += [row.value for _ in range(2) for row in _rows(own(), evaluated, tmp_path)]
        monkeypatch.setattr(own, "run", None)
        figures += [row.value for row in _rows(own(), evaluated, tmp_path)]
    assert figures == [1, 1, 1, 2, 2, 2]


def test_a_protocol_that_forgets_an_option_is_refused(monkeypatch):
    """Its results with one option would be taken for those with another."""

    class Forgetful(Protocol):
        def __init__(self, k: int = 1) -> None:
            self.neighbours = 2 * (k // 2)

    PROTOCOLS.import_from_location()
    monkeypatch.setitem(PROTOCOLS.module_dict, "Forgetful", Forgetful)
    with pytest.raises(
        UserError, match=r"Forgetful has no attribute `k` of its option.s name.*set self\.k in"
    ):
        build_protocols([dict(type="Forgetful", k=3)], {"train": None, "val": None})


def test_the_same_protocol_with_other_options_has_rows_of_its_own():
    """The default's keep their names, which recorded results have; the others' say what is different."""
    evaluated = evaluated_clusters()
    protocols = [NearestNeighbours(), NearestNeighbours(k=1), LowShot(shots=[1], draws=1)]
    rows = tell_apart(protocols, [protocol.run(evaluated) for protocol in protocols])
    names = [row.name for some in rows for row in some]
    assert names[1] == "k-NN, mean"
    assert names[4] == "k-NN (k=1), mean"
    assert names[6:] == ["logistic regression, both, 1 a class"]
    assert rows[1][1].value == NearestNeighbours(k=1).run(evaluated)[1].value
    assert len(results_table({"x": [row for some in rows for row in some]}).rows) == 7


def test_a_single_protocol_keeps_its_name_whatever_its_options():
    rows = [[Row("k-NN", "mean", 1.0)]]
    assert tell_apart([NearestNeighbours(k=5)], rows) == rows


def test_results_of_one_name_are_refused():
    twice = [dict(type="NearestNeighbours", k=5)] * 2
    with pytest.raises(UserError, match="have NearestNeighbours twice with the same options: leave one out"):
        build_protocols(twice, {})
    with pytest.raises(UserError, match="two results of the name `a, b`: leave one out"):
        tell_apart([LowShot()], [[Row("a", "b", 1.0), Row("a", "b", 2.0, "%")]])


def test_what_could_not_be_measured_is_tried_again(tmp_path):
    """As tokens that are extracted after the first evaluation; empty files of earlier versions, too."""

    class Late(LowShot):
        needs = {}  # noqa: RUF012
        found = []  # noqa: RUF012

        def run(self, evaluated):
            return list(self.found)

    known = Evaluated(None, {}, {}, torch.device("cpu"))
    assert _rows(Late(), known, tmp_path) == []
    assert not list(tmp_path.rglob("*.json"))
    Late.found = [Row("a", "b", 1.0)]
    assert _rows(Late(), known, tmp_path) == Late.found
    (file,) = tmp_path.rglob("*.json")
    file.write_text("[]")
    assert _rows(Late(), known, tmp_path) == Late.found
    Late.found = []
    assert _rows(Late(), known, tmp_path) == [Row("a", "b", 1.0)], "what was measured is kept"
