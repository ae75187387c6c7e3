"""Convert weights between libraries; see `mapet_mm.interop.convert`."""

from mapet_mm.interop.convert import *  # noqa: F403
