"""The report holds the numbers, loads nothing, and its pictures are pictures."""

import base64
import io
import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from PIL import Image

from mapet_mm.visualization.report import Column, Report, Section, Table, write_report

TABLE = Table(
    columns=[
        Column("task"),
        Column("no pre-training (%)", ".1f"),
        Column("MaPeT (%)", ".1f"),
        Column("gain", "+.1f"),
    ],
    rows=[["linear probe, 100 labels", 63.24, 71.46, 8.22], ["UperNet", None, 40.0, None]],
    notes=["one seed, <2 images"],
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([1, 2], [3, 4])
    report = Report(
        title="MaPeT <demo>",
        summary="Digits & scenes",
        results=TABLE,
        sections=[Section("Curves", "loss < accuracy", [figure, figure])],
        facts=[("torch", "2.11.0")],
        commands=["python tools/train.py a.py --cfg-options x='<y>'"],
    )
    path = write_report(tmp_path_factory.mktemp("report") / "new/report.html", report)
    return path.read_text(encoding="utf-8")


def test_report_shows_every_number_name_and_command(page):
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert cells == [
        *["linear probe, 100 labels", "63.2", "71.5", "+8.2"],
        *["UperNet", "–", "40.0", "–"],
        *["torch", "2.11.0"],
    ]
    assert "python tools/train.py a.py --cfg-options x=&#x27;&lt;y&gt;&#x27;" in page
    assert "MaPeT &lt;demo&gt;" in page
    assert "Digits &amp; scenes" in page


def test_names_of_a_table_are_text_whatever_they_hold(tmp_path):
    """Names of models and data sets are other people's: no cell, heading or fact is markup."""
    name = '<b onclick="x">a & b</b>'
    table = Table([Column(name), Column("value")], [[name, name]], notes=[name])
    page = write_report(tmp_path / "report.html", Report("t", "s", table, facts=[(name, name)])).read_text()
    shown = "&lt;b onclick=&quot;x&quot;&gt;a &amp; b&lt;/b&gt;"
    assert page.count(shown) == 6
    assert "<b" not in page.partition("<body>")[2]


def test_report_loads_nothing_and_its_tags_are_balanced(page):
    assert not re.search(r"https?://|url\(|@import|<script|<link|href", page)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r' src="([^"]*)', page))
    body = re.sub(r"<meta [^>]*>|<img [^>]*>", "", page.partition("\n")[2])
    ElementTree.fromstring(body)


def test_all_pictures_decode_at_the_size_of_their_figure(page):
    for data in re.findall(r"base64,([^\"]+)", page):
        assert Image.open(io.BytesIO(base64.b64decode(data))).size == (400, 200)
