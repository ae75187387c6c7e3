"""The messages that the page on troubleshooting quotes are those of the code."""

import ast
import re

import pytest
from config_building import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = re.findall(r"^- \*\*(.+)\*\*<br>$", PAGE, re.MULTILINE)
MESSAGES = [message for message in QUOTED if "(PyTorch)" not in message]
TEXTS = [
    node.value
    for folder in ("mapet_mm", "tools")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if ".mim" not in file.parts
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
]


def pieces(message: str) -> list[str]:
    """The parts of a message between the dots, which stand for names and numbers."""
    return [piece.strip() for piece in message.strip("`").split("...")]


def test_the_page_has_the_messages_that_users_meet():
    assert len(MESSAGES) >= 20


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_of_the_code(message):
    said = [piece for piece in pieces(message) if any(piece in text for text in TEXTS)]
    assert said == pieces(message)
