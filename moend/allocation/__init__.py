"""Allocators: how many entries, and at how many bits, each layer gets under a budget."""

from moend.allocation.adaptive import adaptive
from moend.allocation.demand import Demand
from moend.allocation.headed import headed
from moend.allocation.pyramid import pyramid
from moend.allocation.ripple import ripple
from moend.allocation.routed import routed
from moend.allocation.shares import shaped
from moend.allocation.threshold import head_tokens
from moend.allocation.uniform import uniform

__all__ = ["Demand", "adaptive", "head_tokens", "headed", "pyramid", "ripple", "routed", "shaped", "uniform"]
