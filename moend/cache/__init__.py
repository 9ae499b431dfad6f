"""The compressed cache: packing, rows, attention, prefill. The only place that knows transformers' caches."""

from moend.cache.attention import NAME, attention_of
from moend.cache.cache import CompressedCache
from moend.cache.prefill import LayerCapture, LayerSpec, Prefilled, cache_argument, compress, prefill
from moend.cache.row import Reindex, Row, Schedule, ragged
from moend.cache.select import Selector, select

__all__ = [
    "NAME",
    "CompressedCache",
    "LayerCapture",
    "LayerSpec",
    "Prefilled",
    "Reindex",
    "Row",
    "Schedule",
    "Selector",
    "attention_of",
    "cache_argument",
    "compress",
    "prefill",
    "ragged",
    "select",
]
