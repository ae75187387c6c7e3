"""What the tests of tables share."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _impatient():
    """Runs that take no time are looked at more often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mapet_mm.experiments.local.POLL_SECONDS", 0.02)
        yield
