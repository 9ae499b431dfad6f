"""moend: KV-cache compression, per layer and per axis, measured at matched bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moend.compression import compress
    from moend.methods.spec import Method, method

__all__ = ["Method", "compress", "method"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load on first use: importing torch and transformers takes seconds, and plans need neither."""
    if name == "compress":
        from moend.compression import compress

        return compress
    if name in ("Method", "method"):
        from moend.methods import spec as methods

        return getattr(methods, name)
    raise AttributeError(f"module 'moend' has no attribute '{name}'")
