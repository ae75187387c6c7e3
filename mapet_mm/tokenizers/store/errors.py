"""What a token store cannot do for its user."""

from mapet_mm.errors import UserError

REMEDY = "run tools/extract_tokens.py with the tokenizer's config"
RESTORE = "restore it from a copy, or extract into another token store with tools/extract_tokens.py"


class TokenStoreError(UserError, ValueError):
    """A token store that cannot be made, read or written; the message is one line that says what to do."""


class MissingTokensError(TokenStoreError, KeyError):
    """An image that the token store does not know, or whose tokens are not written yet."""
