"""What a token store cannot do for its user."""

REMEDY = "run tools/extract_tokens.py with the tokenizer's config"


class TokenStoreError(ValueError):
    """A token store that cannot be made, read or written; the message is one line that says what to do."""


class MissingTokensError(TokenStoreError, KeyError):
    """An image that the token store does not know, or whose tokens are not written yet."""

    # KeyError would print the message in quotes.
    __str__ = ValueError.__str__
