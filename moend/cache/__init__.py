"""The compressed cache: packing, layout while decoding, eviction, prefill."""

from moend.cache.compressed import CompressedCache
from moend.cache.layer_kv import PROMPT_ONLY, LayerKV, Reindex, Schedule
from moend.cache.prefill import LayerCapture, LayerSpec, Prefilled, compress, prefill
from moend.cache.select import Selector, select
from moend.hf.attention import NAME, attention_of
from moend.hf.config import cache_argument

__all__ = [
    "NAME",
    "PROMPT_ONLY",
    "CompressedCache",
    "LayerCapture",
    "LayerKV",
    "LayerSpec",
    "Prefilled",
    "Reindex",
    "Schedule",
    "Selector",
    "attention_of",
    "cache_argument",
    "compress",
    "prefill",
    "select",
]
