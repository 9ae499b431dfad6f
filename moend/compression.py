"""`with moend.compress(model, method, budget): model.generate(...)`: for people with a script of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moend import calibration as calibrations
from moend.budget import Arch, Budget
from moend.cache import CompressedCache, Prefilled, attention_of, cache_argument, prefill
from moend.cache.prefill import LEFT_ONLY
from moend.calibration import Artefact
from moend.engine import rotations
from moend.errors import UserError
from moend.hf.probe import shape_of
from moend.methods.bind import BoundMethod, Moment, Protocol, bind
from moend.methods.spec import Method
from moend.methods.spec import method as named
from moend.plan import RoutingPlan
from moend.replay import OBSERVATIONS, Replay

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@contextmanager
def compress(
    model: Any,
    method: str | Method,
    budget: object,
    *,
    plan: RoutingPlan | None = None,
    calibration: Mapping[str, Artefact] | str | Path | None = None,
    calibrate: bool | str = False,
    max_new_tokens: int | None = None,
    protocol: Protocol = "matched",
    budget_at: Moment = "prompt",
    store_dtype: torch.dtype | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    context: tuple[int, int] | None = None,
    reconstruction: str = "",
) -> Iterator[None]:
    """Inside this context, `model.generate` compresses every prompt before it generates the first token.

    The model reads the prompt but for its last token, the method keeps what fits the budget, and the last token is fed
    to the compressed cache: so the first answer token already comes from what was kept. Batches with left padding,
    sampling, beams, `num_return_sequences`, streamers and `pipeline("text-generation")` work as without compression.

    Several turns: pass the cache of one turn to the next, `generate(ids, past_key_values=out.past_key_values)`. New
    turns are appended; methods that evict while decoding go on evicting. After a left-padded batch a second turn is
    refused. Assisted decoding is refused, because evicted entries cannot come back.

    Args:
        model: a transformers decoder in eval mode. Its attention function and its forward are restored at the end,
            after errors too. Of nested contexts the inner one holds.
        method: the name of a file of conf/method, or a `Method`.
        budget: tokens per layer at 16 bit (512), a share of each prompt's cache ("10%") or bytes ("64MiB").
        plan: a routing plan to follow instead of solving one.
        calibration: artefacts by kind, or a folder of them as `pipelines.calibrate` leaves it.
        calibrate: True measures what is missing now, with `tokenizer` and default settings, and shows its progress; a
            folder's path also saves it there and reads it from there the next time.
        max_new_tokens: the most tokens that will be generated. None means unknown: methods that evict while decoding
            then hold their caps up to the model's last position.
        protocol: "matched" (the same resident bytes for every method) or "paper" (MoE-nD's exchange rates).
        budget_at: when the budget binds: "prompt" (after the prompt; methods that evict then hold up to `beta` entries
            more between evictions, prompt-only methods what they generate) or "peak" (nobody holds more at any step).
        store_dtype: of 16-bit entries. None: the model's own dtype if it has 16 bits, else bfloat16.
        seed: of methods that draw.
        tokenizer: needed by KVZip and MoEZip, which have the model repeat the context, one prompt at a time.
        context: (start, stop), the prompt's tokens that are context; what follows is the question. None: all of it.
        reconstruction: the words that ask for the context, for a model that does not know KVZip's.

    Raises:
        UserError: a setting, a model or a call that moend does not understand. Blocked: a calibration is missing.
    """
    chosen = named(method) if isinstance(method, str) else method
    if store_dtype is None:
        store_dtype = model.dtype if model.dtype.itemsize == 2 else torch.bfloat16
    shape = shape_of(model)
    kinds = [k for k in chosen.calibrations if plan is None or not calibrations.kind(k).makes_plans]  # a plan replaces
    folder = Path(calibrate) if isinstance(calibrate, str) else None
    if folder is not None and calibration is None and folder.is_dir():
        calibration = folder
    artefacts = _artefacts(calibration)
    if calibrate and (missing := [k for k in kinds if k not in artefacts]):
        artefacts |= _measured(model, shape.arch, tokenizer, chosen, missing, artefacts, folder)
    bound = bind(
        chosen,
        Budget.parse(budget),
        protocol,
        shape.arch,
        t_ref=t_ref if isinstance(t_ref := chosen.make_allocator().t_ref, int) else None,
        artefacts=artefacts,
        at=budget_at,
        store_dtype=store_dtype,
        given=plan,
    )
    for kind in kinds:
        bound.artefact(kind)
    hook = _PromptHook(model, bound, max_new_tokens, seed, tokenizer, context, reconstruction)
    with attention_of(model), _whole_prompts(model):
        handle = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


class _PromptHook:
    """A forward pre-hook: it replaces a call with a whole prompt by a call with the compressed cache and one token."""

    def __init__(
        self,
        model: Any,
        bound: BoundMethod,
        max_new_tokens: int | None,
        seed: int,
        tokenizer: Any,
        context: tuple[int, int] | None,
        reconstruction: str,
    ):
        self.model, self.bound, self.max_new_tokens, self.seed, self.context = (
            model, bound, max_new_tokens, seed, context,
        )  # fmt: skip
        made = bound.method.make_scorer()
        self.last_queries, self.observes = (made.last_queries, set(made.observes)) if made else (0, set())
        self.replays = self.observes & set(OBSERVATIONS)
        self.replay = Replay(model, tokenizer, bound.arch.max_positions, wording=reconstruction)
        if self.replays and tokenizer is None:
            raise UserError(
                f"{bound.method.name} asks the model to repeat the context: moend.compress needs tokenizer="
            )
        if self.replays:
            self.replay.request  # noqa: B018 (refuses a tokenizer that does not know its words)
        self.shape, self.cache_name = shape_of(model), cache_argument(model)
        self.scaling = [rule.scaling for rule in self.shape.rules]

    def __call__(self, module: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """None leaves the call as it is: a compressed cache is there already."""
        cache = kwargs.get(self.cache_name)
        cache = kwargs.get("past_key_values") if cache is None else cache
        mask: Tensor | None = kwargs.get("attention_mask")
        if isinstance(cache, CompressedCache):
            _next_turn(cache, kwargs.get("input_ids", args[0] if args else None), mask)
            return None
        if cache is not None and cache.get_seq_length() > 0:
            raise UserError("moend.compress needs the whole prompt: the model was given a cache that is already filled")
        if kwargs.get("use_cache") is False:
            raise UserError("use_cache=False computes without a cache: leave it out, or leave moend.compress")
        for key in ("labels", "output_attentions"):
            if kwargs.get(key) is not None and kwargs[key] is not False:
                raise UserError(
                    f"{key}= asks for every position of the prompt, and a compressed prompt has its last only"
                )
        ids: Tensor | None = kwargs.pop("input_ids", None)
        if ids is None and args:
            ids, args = args[0], args[1:]
        if ids is None:
            raise UserError("moend.compress needs input_ids (prompts given as inputs_embeds are not supported)")
        if mask is not None and mask.ndim == 2 and not bool(mask[:, -1].all()):
            raise UserError(LEFT_ONLY)
        compressed = self.compressed(ids, mask)
        seen = torch.tensor([[parts[0].tokens_seen] for parts in compressed.layers[0].parts], device=ids.device)
        kwargs.pop("past_key_values", None)
        kwargs.pop("cache_position", None)
        own = {"input_ids": ids[:, -1:], "position_ids": seen, "use_cache": True, self.cache_name: compressed}
        return args, {**kwargs, **own}

    def compressed(self, ids: Tensor, mask: Tensor | None) -> CompressedCache:
        """What the method keeps of prompts ids (B, T) but for their last tokens."""
        bound, length = self.bound, ids.shape[1] - 1
        if not length:
            done = Prefilled.empty(self.shape, ids, self.model.config)
        else:
            shorter = None if mask is None else mask[:, :length]
            observe = self.observes - self.replays
            done = prefill(self.model, ids[:, :length], shorter, last_queries=self.last_queries, observe=observe)
            if self.replays and not bound.fits(done.tokens(), self.follow(done.tokens())[1]):
                if ids.shape[0] > 1:
                    raise UserError(f"{bound.method.name} reads each context once more: give it one prompt at a time")
                done = self.replayed(done, ids[0, :-1].tolist())
        rotary = rotations(self.model) if bound.needs_rotary else None
        caches = []
        for row in range(ids.shape[0]):
            fitted, new = self.follow(done.tokens(row))
            if not done.tokens(row) and bound.budget.kind == "ratio":
                fitted = self.whole()  # a share of nothing holds nothing: a prompt of one token keeps it
            caches.append(fitted.fork(done, new, seed=self.seed, row=row, rotary=rotary, scaling=self.scaling))
        return CompressedCache.join(caches)

    def whole(self) -> BoundMethod:
        """The method that keeps all."""
        bound = self.bound
        everything, all_of_it = named("full"), Budget.parse("100%")
        return bind(everything, all_of_it, bound.protocol, bound.arch, t_ref=None, store_dtype=bound.store_dtype)

    def follow(self, tokens: int) -> tuple[BoundMethod, int]:
        """The method fitted to a prompt of this length, and how many tokens may follow it."""
        bound = self.bound
        if self.max_new_tokens is not None or bound.method.schedule == "prompt":
            return bound, self.max_new_tokens or 128
        # Caps must hold for as long as the model can go on; shares then refer to four budgets, as for any long
        # generation (`reference_length`).
        positions = bound.arch.max_positions
        share = 4 * bound.budget.to_bytes(bound.arch, tokens) // bound.arch.full_bytes(1)
        if bound.t_ref is None:
            bound = replace(bound, t_ref=max(min(share, positions), 2), _plans={})
        return bound, max(positions - tokens, 1)

    def replayed(self, done: Prefilled, ids: list[int]) -> Prefilled:
        """The prefill with what the scorer's replays show."""
        start, stop = self.context or (0, len(ids))
        if not 0 <= start < stop:
            raise UserError(f"context=({start}, {stop}) must be a start and a later stop among the prompt's tokens")
        return self.replay.observe(done, self.replays, ids, (min(start, len(ids) - 1), min(stop, len(ids))))


def _next_turn(cache: CompressedCache, ids: Tensor | None, mask: Tensor | None) -> None:
    """UserError where several tokens follow a left-padded prompt: the model could not tell where they stand."""
    if ids is None or ids.shape[1] == 1:
        return
    seen = {parts[0].tokens_seen for parts in cache.layers[0].parts}
    if len(seen) > 1 or (mask is not None and mask.ndim == 2 and not bool(mask.all())):
        raise UserError("a second turn after left padding is not supported: continue each sequence on its own")


@contextmanager
def _whole_prompts(model: Any) -> Iterator[None]:
    """Refuse `generate(prefill_chunk_size=...)`, which would show each piece of a prompt as a prompt."""
    own = getattr(model, "_prefill", None)
    if own is None:
        yield
        return

    def checked(input_ids: Tensor, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        if generation_config.prefill_chunk_size is not None:
            raise UserError(
                f"prefill_chunk_size={generation_config.prefill_chunk_size} would compress the prompt piece by piece: "
                "leave it unset, the prompt is fed in pieces anyway"
            )
        return own(input_ids, generation_config, *args, **kwargs)

    outer = vars(model).get("_prefill")  # of nested contexts
    model._prefill = checked
    try:
        yield
    finally:
        del model._prefill
        if outer is not None:
            model._prefill = outer


TEXT = "Solve the equation x^2 - 5x + 6 = 0. Think step by step and show all work."  # MoE-nD's prompt, as plain text


def _measured(
    model: Any,
    arch: Arch,
    tokenizer: Any,
    method: Method,
    missing: Sequence[str],
    held: Mapping[str, Artefact],
    folder: Path | None,
) -> dict[str, Artefact]:
    """Measure the missing kinds of calibration on this model, the scorer's own statistics first."""
    from moend.models.load import LoadedModel, calibration_ids
    from moend.models.spec import ModelSpec

    if tokenizer is None:
        raise UserError(f"{method.name} needs a calibration: calibrate=True measures it with tokenizer=")
    name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
    spec = ModelSpec(name=type(model).__name__, id=type(model).__name__, calibration_text=TEXT)  # nothing is fetched
    loaded = LoadedModel(model, tokenizer, spec, arch, "", model.dtype, model.device)
    target = calibrations.Target(calibrations.Calibration(), method, spec)
    replay = Replay(model, tokenizer, arch.max_positions)
    scorer, made = method.make_scorer(), dict(held)
    statistics = scorer.statistics if scorer is not None else None
    for kind in sorted(missing, key=lambda k: k != statistics):
        own = made[statistics].tensors if statistics in made and kind != statistics else None
        prompt = torch.tensor([calibration_ids(loaded)], device=model.device)
        bench = calibrations.Bench(loaded, prompt, own, replay.observe, _progress)
        tensors, info = calibrations.kind(kind).measure(target, bench)
        shape = {k: getattr(arch, k) for k in ("layers", "q_heads", "kv_heads", "head_dim", "max_positions")}
        made[kind] = Artefact(kind, {"model": name, "arch": shape}, tensors, info)
        if folder is not None:
            made[kind].save(folder / kind)
    return {kind: made[kind] for kind in missing}


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A line on standard error that counts what is measured."""

    def step(done: int, total: int) -> None:
        print(f"\r{what}: {done} of {total}", end="", file=sys.stderr, flush=True)

    yield step
    print(file=sys.stderr)


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
