"""Pages that are right on the forge and on the site: links out of docs/, the changelog and the catalogue."""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")

METHOD = re.compile(r"\]\((?=[a-z_]+/README)")  # a link of configs/README.md


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Let links out of docs/ lead to the repository, or name the file if the site knows no repository."""
    uri = page.file.src_uri
    if uri == "changelog.md":
        markdown = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    if uri == "configs.md":
        markdown = (ROOT / "configs/README.md").read_text()
        markdown = METHOD.sub("](../configs/", markdown).replace("](../docs/", "](")
    folder = posixpath.dirname(posixpath.join("docs", uri))

    def outside(link: re.Match) -> str:
        text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return link[0]
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor or ''})"
        return text if text.strip("`") in path else f"{text} (`{path}`)"

    return LINK.sub(outside, markdown)
