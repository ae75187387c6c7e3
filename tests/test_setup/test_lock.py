"""The lock pins every direct dependency and names no index and no path."""

import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def read_requirements(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def test_lock_pins_each_direct_dependency_inside_its_range():
    pinned = {}
    for requirement in read_requirements("requirements.lock"):
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        pinned.setdefault(canonicalize_name(requirement.name), []).append(pin.version)
    for requirement in read_requirements("requirements.txt"):
        versions = pinned[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), requirement
    assert pinned["torch"] == ["2.11.0"]


def test_lock_has_no_address_and_no_absolute_path():
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"https?://|file:|--(extra-)?index-url|--find-links|\s/\w+/", text)
