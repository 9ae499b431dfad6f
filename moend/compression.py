"""`with moend.compress(model, method, budget): model.generate(...)`: for people with a script of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moend.budget import Arch, Budget
from moend.cache import CompressedCache, Prefilled, attention_of, cache_argument, prefill
from moend.calibration.artefact import Artefact
from moend.engine import attention_scaling, rotations
from moend.errors import UserError
from moend.hf.routers import Routing
from moend.methods.bind import BoundMethod, Method, Protocol, bind
from moend.methods.bind import method as named
from moend.plan import RoutingPlan
from moend.replay import OBSERVATIONS, Passes, request

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def arch_of(config: Any) -> Arch:
    """The shape of a model's cache, read from its own config."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    return Arch(
        layers=text.num_hidden_layers,
        q_heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        max_positions=text.max_position_embeddings,
    )


@contextmanager
def compress(
    model: Any,
    method: str | Method,
    budget: object,
    *,
    plan: RoutingPlan | None = None,
    calibration: Mapping[str, Artefact] | str | Path | None = None,
    max_new_tokens: int | None = None,
    protocol: Protocol = "matched",
    store_dtype: torch.dtype | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    context: tuple[int, int] | None = None,
    reconstruction: str = "",
) -> Iterator[None]:
    """Inside this context, every prompt that `model` prefills is compressed before its first token is generated.

    method: a name of conf/method or a Method. budget: as on the command line (512, "10%", "64MiB"). plan: a routing
    plan instead of solving one. calibration: artefacts by kind, or a folder of them as `pipelines.calibrate` leaves it.
    max_new_tokens: what will be generated at most (None: no limit is known, so methods that evict while decoding keep
    their caps up to the model's last position; nothing is compressed only where all of that fits the budget).
    store_dtype: of 16-bit entries (None: the model's own if it has 16 bits, else bfloat16). Left-padded batches work;
    the model's attention function and forward are restored at the end, errors included. Of nested contexts the inner
    one holds. `generate(prefill_chunk_size=...)` would compress after its first chunk: leave it unset, the prompt is
    fed in chunks anyway.
    For KVZip and MoEZip, one prompt at a time: tokenizer; context (start, stop): which of the prompt's tokens are the
    context, the others behind it the question (None: all of it is context); reconstruction: how to ask for the context,
    for a model that does not know KVZip's words.
    """
    chosen = named(method) if isinstance(method, str) else method
    artefacts = _artefacts(calibration)
    if store_dtype is None:
        store_dtype = model.dtype if model.dtype.itemsize == 2 else torch.bfloat16
    bound = bind(
        chosen,
        Budget.parse(budget),
        protocol,
        arch_of(model.config),
        t_ref=chosen.t_ref if isinstance(chosen.t_ref, int) else None,
        artefacts=artefacts,
        store_dtype=store_dtype,
        given=plan,
    )
    for kind in chosen.calibrations:
        if kind not in ("sensitivity", "kl", "ripple", "damage") or plan is None:  # what a given plan replaces
            bound.artefact(kind)
    scaling = attention_scaling(model)
    made = chosen.make_scorer()
    extra = set(made.observes) & set(OBSERVATIONS) if made is not None else set()
    ask = request(tokenizer, reconstruction) if tokenizer is not None and extra else None
    if extra and ask is None:
        raise UserError(f"{chosen.name} asks the model to repeat the context: moend.compress needs tokenizer=")
    name = cache_argument(model)

    def follow(tokens: int) -> tuple[BoundMethod, int]:
        """The method fitted to a prompt of this length, and how many tokens may follow it."""
        if max_new_tokens is not None or chosen.schedule == "prompt":
            return bound, max_new_tokens or 128
        # Caps must hold for as long as the model can go on; shares then refer to four budgets, as for any long
        # generation (`methods.reference_length`).
        positions = bound.arch.max_positions
        share = 4 * bound.budget.to_bytes(bound.arch, tokens) // bound.arch.full_bytes(1)
        fitted = bound if bound.t_ref is not None else replace(bound, t_ref=max(min(share, positions), 2), _plans={})
        return fitted, max(positions - tokens, 1)

    def reread(done: Prefilled, ids: list[int]) -> Prefilled:
        """The prefill with what the extra passes show."""
        routing = None
        if extra - {"reconstruction"}:
            routing = Routing.of(model, torch.tensor([ids[:64]], device=model.device))
        passes = Passes(model, bound.arch.max_positions, ask, routing)
        start, stop = context or (0, len(ids))
        if not 0 <= start < stop:
            raise UserError(f"context=({start}, {stop}) must be a start and a later stop among the prompt's tokens")
        return passes.observe(done, extra, ids, (min(start, len(ids) - 1), min(stop, len(ids))))

    def compress_prompt(module: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        cache = kwargs.get(name) if kwargs.get(name) is not None else kwargs.get("past_key_values")
        if isinstance(cache, CompressedCache) or kwargs.get("use_cache") is False:
            return None
        if cache is not None and cache.get_seq_length() > 0:
            raise UserError("moend.compress needs the whole prompt: the model was given a cache that is already filled")
        ids: Tensor | None = kwargs.pop("input_ids", None)
        if ids is None and args:
            ids, args = args[0], args[1:]
        if ids is None:
            raise UserError("moend.compress needs input_ids (prompts given as inputs_embeds are not supported)")
        mask: Tensor | None = kwargs.get("attention_mask")
        if ids.shape[1] > 1:
            shorter = None if mask is None else mask[:, : ids.shape[1] - 1]
            done = prefill(
                model,
                ids[:, :-1],
                shorter,
                last_queries=made.last_queries if made else 0,
                observe=set(made.observes) - extra if made else (),
            )
            if extra and not bound.fits(done.tokens(), follow(done.tokens())[1]):
                if ids.shape[0] > 1:
                    raise UserError(f"{chosen.name} reads each context once more: give it one prompt at a time")
                done = reread(done, ids[0, :-1].tolist())
        else:
            done = Prefilled.empty(bound.arch, ids, model.config)
        rotation = rotations(model) if bound.needs_rotary else None
        caches = []
        for r in range(ids.shape[0]):
            fitted, new = follow(done.tokens(r))
            caches.append(fitted.fork(done, new, seed=seed, row=r, rotary=rotation, scaling=scaling))
        full = CompressedCache.join(caches)
        seen = torch.tensor([[parts[0].seen] for parts in full.layers[0].parts], device=ids.device)
        kwargs.pop("past_key_values", None)
        kwargs.pop("cache_position", None)
        return args, {**kwargs, "input_ids": ids[:, -1:], "position_ids": seen, "use_cache": True, name: full}

    with attention_of(model):
        handle = model.register_forward_pre_hook(compress_prompt, prepend=True, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _artefacts(given: Mapping[str, Artefact] | str | Path | None) -> dict[str, Artefact]:
    """Artefacts by kind; a folder is searched for them."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    found = [Artefact.load(p.parent) for p in sorted(Path(given).rglob("artefact.json"))]
    if not found:
        raise UserError(f"no calibration in '{given}': make one with python -m pipelines.calibrate")
    kinds = [a.kind for a in found]
    if len(set(kinds)) < len(kinds):
        raise UserError(f"'{given}' holds several calibrations of one kind: name the folder of one model and setting")
    return dict(zip(kinds, found, strict=True))
