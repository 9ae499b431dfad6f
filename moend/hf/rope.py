"""Rotary position embedding as complex rotation, read from the model's own rotary module.

RoPE turns a head's vector x at position p into s * x_f * e^(i omega_f p), where x_f = x[f] + i x[f + r] is a complex
pair of dimensions, omega_f a frequency and s the attention scaling (yarn and longrope have s != 1). Every rope type of
transformers is only another choice of omega and s, so both are read from the module as they are in use now.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from moend.errors import UserError


@dataclass(frozen=True)
class Rotary:
    """One layer's rotation: inv_freq (r,) float32, radians per position; the first dim = 2r dimensions of a head turn.

    Dimensions past `dim` (partial rotary) do not turn: they count as pairs of frequency 0 and scale 1, so that every
    head has d/2 pairs, the r turning ones first. A layer without RoPE is a Rotary whose frequencies are all 0.
    """

    inv_freq: Tensor
    scaling: float  # what rotated queries and keys are multiplied with (attention scaling)
    dim: int

    def frequencies(self, head_dim: int) -> Tensor:
        """(d/2,) float32: inv_freq, then 0 for the pairs that do not turn."""
        return nn.functional.pad(self.inv_freq, (0, self._still(head_dim)))

    def scales(self, head_dim: int) -> Tensor:
        """(d/2,) float32: the attention scaling, then 1 for the pairs that do not turn."""
        return nn.functional.pad(torch.full_like(self.inv_freq, self.scaling), (0, self._still(head_dim)), value=1.0)

    def _still(self, head_dim: int) -> int:
        still, odd = divmod(head_dim - self.dim, 2)
        if still < 0 or odd or self.dim != 2 * len(self.inv_freq):
            raise UserError(
                f"a head of {head_dim} dimensions cannot be cut into pairs with {self.dim} rotated dimensions"
            )
        return still


def pairs(x: Tensor, rot: Rotary) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts of a head's pairs: x (..., d) -> two of (..., d/2), views where RoPE is not partial.

    Pairs are (i, i + r) of the first 2r dimensions, then (i, i + s) of the 2s dimensions that do not turn.
    """
    r, still = rot.dim // 2, rot._still(x.shape[-1])
    real, imag = x[..., :r], x[..., r : 2 * r]
    if not still:
        return real, imag
    rest = x[..., 2 * r :]
    return torch.cat((real, rest[..., :still]), -1), torch.cat((imag, rest[..., still:]), -1)


def unpairs(real: Tensor, imag: Tensor, rot: Rotary) -> Tensor:
    """The inverse of `pairs`: two of (..., d/2) -> (..., d)."""
    r = rot.dim // 2
    return torch.cat((real[..., :r], imag[..., :r], real[..., r:], imag[..., r:]), -1)


def unrotate(x: Tensor, positions: Tensor, rot: Rotary) -> Tensor:
    """x before RoPE, in float32: each pair turned back by its own position and divided by the attention scaling.

    x: (B, H, n, d) roped; positions: (B, n) or (B, H, n) original positions, -1 at padding (its vectors come out
    turned by nothing). The angle is the float32 product that transformers computes, so the round trip is exact to
    float32 rounding at any position.
    """
    at = positions[:, None] if positions.dim() == 2 else positions
    freq = rot.frequencies(x.shape[-1]).to(x.device)
    angle = at.clamp(min=0).float()[..., None] * freq
    scale = 1.0 / rot.scales(x.shape[-1]).to(x.device)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    real, imag = pairs(x.float(), rot)
    return unpairs(real * cos + imag * sin, imag * cos - real * sin, rot)


def back(x: Tensor, positions: int, rot: Rotary) -> Tensor:
    """x (..., d), roped at some position, as if it stood `positions` before it: float32."""
    angle = positions * rot.frequencies(x.shape[-1]).to(x.device).double()
    cos, sin = angle.cos().float(), angle.sin().float()
    real, imag = pairs(x.float(), rot)
    return unpairs(real * cos + imag * sin, imag * cos - real * sin, rot)


def rotary(model: Any, layer: int | None = None) -> Rotary:
    """The rotation in use now in `layer` (None: in all layers, which must then agree).

    Call it after the prefill whose keys are to be turned back: `dynamic` and `longrope` change their frequencies with
    the length seen. The result is a snapshot, later passes do not change it.

    What is read is checked once per layer against what the model's own attention does to a key at a few positions,
    so a layout that differs (interleaved pairs as in Cohere and GLM, latent attention, a norm after RoPE) is a
    UserError that names the model, never a wrong score.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    attentions = _attentions(decoder)
    if not attentions:
        raise _refuse(model, "no attention layers that take `position_embeddings`")
    if layer is not None:
        if layer not in attentions:
            raise UserError(f"layer {layer} has no attention in {type(model).__name__}: it has {sorted(attentions)}")
        return _layer(model, decoder, attentions[layer], layer)
    first, *others = (_layer(model, decoder, attentions[i], i) for i in sorted(attentions))
    for other in others:
        if other.scaling != first.scaling or not torch.equal(other.inv_freq, first.inv_freq):
            raise _refuse(model, "layers differ in their rotation; ask for one layer")
    return first


def depends_on_length(model: Any) -> bool:
    """Whether frequencies change with the longest position seen (`dynamic`, `longrope`).

    Keys of such a model belong together only if one pass made them: a prefill in chunks would turn early chunks by
    other frequencies than late ones.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    kind = getattr(getattr(decoder, "rotary_emb", None), "rope_type", "default")
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any("dynamic" in k or k == "longrope" for k in kinds)


def _refuse(model: Any, why: str) -> UserError:
    name = type(model).__name__
    return UserError(f"the rotary embedding of {name} is not supported: {why} (known: pairs (i, i + r), as in Llama)")


def _attentions(decoder: nn.Module) -> dict[int, nn.Module]:
    """Attention modules by layer index."""
    found: dict[int, nn.Module] = {}
    for module in decoder.modules():
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or "Attention" not in type(module).__name__:
            continue
        if "position_embeddings" in inspect.signature(module.forward).parameters:
            found[index] = module
    return found


def _layer(model: Any, decoder: Any, attention: nn.Module, layer: int) -> Rotary:
    module = getattr(decoder, "rotary_emb", None)
    if module is None:
        raise _refuse(model, "its decoder has no `rotary_emb`")
    kinds = getattr(decoder.config, "layer_types", None)
    kind = kinds[layer] if kinds and hasattr(module, f"{kinds[layer]}_inv_freq") else None
    if kind is None and not isinstance(getattr(module, "inv_freq", None), Tensor):
        raise _refuse(model, "its `rotary_emb` has no `inv_freq`")
    turns = _turns(model, decoder, module, attention, kind)
    rot = _read(module, kind)
    return rot if turns else Rotary(torch.zeros_like(rot.inv_freq), 1.0, rot.dim)


def _read(module: nn.Module, kind: str | None) -> Rotary:
    prefix = f"{kind}_" if kind else ""
    inv_freq = getattr(module, f"{prefix}inv_freq").detach().float().clone()
    return Rotary(inv_freq, float(getattr(module, f"{prefix}attention_scaling", 1.0)), 2 * len(inv_freq))


class _Captured(Exception):
    """Carries the roped keys out of an attention module before it attends."""


class _Probe:
    """Stands in for a cache: takes the first keys it is given and stops the pass there."""

    def update(self, key: Tensor, *_: Any, **__: Any) -> None:
        raise _Captured(key)


# What the check found for each attention module: True if it turns its keys, False if it leaves them as they are.
_checked: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@torch.no_grad()
def _turns(model: Any, decoder: Any, module: nn.Module, attention: nn.Module, kind: str | None) -> bool:
    """Feed one hidden state at several positions: turned back, all its keys must be the key at position 0."""
    if attention in _checked:
        return _checked[attention]
    dtype, device = decoder.dtype, next(attention.parameters()).device
    hidden = torch.randn(decoder.config.hidden_size, generator=torch.Generator().manual_seed(0))
    at = torch.tensor([[0, 1, 2, 5]], device=device)
    x = hidden.to(device, dtype).expand(1, at.shape[1], -1)
    # A copy, because the forward pass of a dynamic rope resets its frequencies when it sees short positions.
    twin = copy.deepcopy(module, memo={id(decoder.config): decoder.config}).to(device)
    embeddings = twin(x, at, kind) if kind else twin(x, at)
    names = inspect.signature(attention.forward).parameters
    cache = next((n for n in ("cache", "past_key_values", "layer_past") if n in names), None)
    if cache is None:
        raise _refuse(model, f"{type(attention).__name__} takes no cache")
    try:
        attention(hidden_states=x, position_embeddings=embeddings, attention_mask=None, **{cache: _Probe()})
    except _Captured as captured:
        keys: Tensor = captured.args[0].float()
    except (TypeError, ValueError, RuntimeError) as e:
        raise _refuse(model, f"{type(attention).__name__} could not be probed: {e}") from e
    else:
        raise _refuse(model, f"{type(attention).__name__} does not hand its keys to the cache")
    config = decoder.config
    if keys.shape[1] != (getattr(config, "num_key_value_heads", None) or config.num_attention_heads):
        raise _refuse(model, f"{type(attention).__name__} does not cache one key per KV head (latent attention)")
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2

    def steady(k: Tensor) -> bool:
        return bool((k - k[:, :, :1]).norm() <= tolerance * k.norm())

    rot = _read(twin, kind)
    if steady(keys):
        _checked[attention] = False
    elif rot.dim <= keys.shape[-1] and steady(unrotate(keys, at, rot)):
        _checked[attention] = True
    else:
        raise _refuse(model, f"{type(attention).__name__} pairs its dimensions in another way")
    return _checked[attention]
