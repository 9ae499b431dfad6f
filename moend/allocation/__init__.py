"""Allocators: how many entries, and at how many bits, each layer gets under a budget."""

from moend.allocation.adaptive import adaptive
from moend.allocation.cost import CostModel
from moend.allocation.global_topk import head_tokens
from moend.allocation.joint import routed
from moend.allocation.per_head import headed
from moend.allocation.pyramid import pyramid
from moend.allocation.ripple import ripple
from moend.allocation.shares import shaped
from moend.allocation.uniform import uniform

__all__ = ["CostModel", "adaptive", "head_tokens", "headed", "pyramid", "ripple", "routed", "shaped", "uniform"]
