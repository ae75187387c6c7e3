"""The page about a codebook: usage of its tokens, and patches that share a token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from mapet_mm.structures.store import TokenStore
from mapet_mm.visualization.codebook_sheet import Patch, SheetRow, count_patches, draw_codebook_sheet
from mapet_mm.visualization.report import Column, Report, Section, Table
from mapet_mm.visualization.token_usage import TokenUsage, draw_usage

TOKENS_PER_SHEET = 8


class Gallery(NamedTuple):
    """Patches of one token to show, and how they were chosen ("random", "nearest to the centroid")."""

    chosen: str
    patches: Sequence[Patch]


class CodebookPictures:
    """Draws a token store's usage and its tokens' galleries, as sheets and as a page.

    Args:
        store: the token store.
        usage: of the store's tokens.
        galleries: for each token to show, in display order.
        image_root: the folder that the store's names are relative to.
        context: patches shown around the framed one, on each side.
        class_names: names of the classes by index if `usage` has classes; indices by default.
    """

    def __init__(
        self,
        store: TokenStore,
        usage: TokenUsage,
        galleries: Mapping[int, Sequence[Gallery]],
        image_root: str,
        context: int = 3,
        class_names: Sequence[str] | None = None,
    ) -> None:
        self.store, self.usage, self.galleries = store, usage, galleries
        self.image_root, self.context, self.class_names = image_root, context, class_names

    def sheets(self) -> list[Figure]:
        """All galleries, eight tokens per figure."""
        tokens = list(self.galleries)
        parts = [
            tokens[start : start + TOKENS_PER_SHEET] for start in range(0, len(tokens), TOKENS_PER_SHEET)
        ]
        return [self._draw(part) for part in parts]

    def report(self, title: str, summary: str, commands: Sequence[str]) -> Report:
        """The page: statistics, usage, and a section for each token."""
        usage = Section(
            "How often tokens are used",
            "Left: patches of each token in use; dotted, what each would have if all were used evenly. "
            "Right: how many tokens have so many patches.",
            [draw_usage(self.usage)],
        )
        tokens = [
            Section(f"Token {token}", self._token_caption(token), [self._draw([token])])
            for token in self.galleries
        ]
        facts = [
            ("token store", str(self.store.path)),
            ("tokenizer", self.store.tokenizer),
            ("images", f"{int(self.store.written().sum()):,} of {len(self.store):,}"),
        ]
        return Report(
            title, summary, usage_table(self.usage), [usage, *tokens], facts=facts, commands=commands
        )

    def _draw(self, tokens: Iterable[int]) -> Figure:
        rows = [
            SheetRow(f"token {token}: {gallery.chosen} of {self._count(token)}", gallery.patches)
            for token in tokens
            for gallery in self.galleries[token]
        ]
        return draw_codebook_sheet(rows, self.image_root, self.store, self.context)

    def _count(self, token: int) -> str:
        return count_patches(int(self.usage.counts[token]))

    def _token_caption(self, token: int) -> str:
        share = 100 * self.usage.counts[token] / self.usage.counts.sum()
        caption = f"{self._count(token)}, {share:.2f} % of all."
        if self.usage.class_counts is None or not self.usage.counts[token]:
            return caption
        main = self.usage.main_class(token)
        name = f"class {main}" if self.class_names is None else f"class {self.class_names[main]}"
        return f"{caption} Class purity {100 * self.usage.purity()[token]:.1f} % ({name})."


def usage_table(usage: TokenUsage) -> Table:
    """The statistics of a codebook's usage."""
    vocab_size = len(usage.counts)
    rows = [
        ["tokens", f"{vocab_size:,}"],
        ["tokens in use", f"{usage.used:,} ({vocab_size - usage.used:,} dead)"],
        ["patches", f"{usage.counts.sum():,}"],
        ["perplexity", f"{usage.perplexity:,.1f}"],
        ["share of the most used token (%)", f"{100 * usage.counts.max() / usage.counts.sum():.2f}"],
    ]
    notes = ["Perplexity: so many tokens, used evenly, would be as hard to guess."]
    if usage.class_counts is not None:
        rows.append(["class purity (%)", f"{100 * usage.mean_purity:.1f}"])
        rows.append(["class purity by chance (%)", f"{100 * usage.chance_purity:.1f}"])
        notes.append(
            "Class purity: share of a token's patches that are in images of its most frequent class, mean "
            "over patches; by chance: what tokens that know nothing of classes have."
        )
    return Table([Column("what"), Column("value")], rows, notes)
