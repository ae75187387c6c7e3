"""Errors of token stores."""

from mapet_mm.utils.errors import UserError

REMEDY = "run tools/extract_tokens.py with the tokenizer's config"
RESTORE = "restore it from a copy, or extract into another token store with tools/extract_tokens.py"


class TokenStoreError(UserError, ValueError):
    """A token store cannot be made, read or written; the message is one line that says what to do."""


class MissingTokensError(TokenStoreError, KeyError):
    """An image is not in the token store, or its tokens are not written yet."""
