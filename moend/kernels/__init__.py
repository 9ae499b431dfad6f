"""Attention over packed entries: one function, and the kernels behind it. See `moend.kernels.choose`."""

from moend.kernels.choose import attention, describe, path
from moend.kernels.entries import Entries, Held

__all__ = ["Entries", "Held", "attention", "describe", "path"]
