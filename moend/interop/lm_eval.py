"""A model of lm-evaluation-harness whose every prompt is compressed: all of its tasks under any method and budget.

    moend-lm-eval run --model moend --model_args pretrained=NAME,method=ripple_2d_head,budget=10% --tasks gsm8k
    lm_eval.simple_evaluate(model=MoendLM("NAME", method="SnapKV", budget="10%"), tasks=["gsm8k"])

The harness loads, tokenises, truncates, batches and scores as it does for its own `hf` model, whose class this one
extends. Only the two calls of the model differ: `generate` runs inside `moend.compress`, and a continuation is scored
after its context was compressed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from moend.budget import Budget
from moend.cache import CompressedCache, cache_argument
from moend.compression import compress
from moend.errors import UserError, unknown
from moend.methods.bind import Moment, Protocol
from moend.methods.spec import Method
from moend.methods.spec import method as named
from moend.models import load as models
from moend.plan import RoutingPlan
from moend.replay import OBSERVATIONS

Ids = tuple[int, ...]
Scored = dict[tuple[Ids, Ids], tuple[float, bool]]  # by (context, continuation): log-likelihood, whether greedy


@register_model("moend")
class MoendLM(HFLM):
    """lm-evaluation-harness' `hf` model, with each prompt's cache compressed by a method to a budget.

    - generate_until: the prompt is compressed but for its last token, then the model answers (`moend.compress`).
    - loglikelihood: the context is compressed but for its last token, then the continuation is fed and scored. All
      continuations of one context share its prefill and its compression.
    - loglikelihood_rolling: each of the harness' windows is scored in blocks of `rolling` tokens; a block is scored
      after all tokens of its window before it were compressed. So every token is scored once, as without compression.

    Args:
        pretrained: a hub name, a folder or a loaded model, as for `hf`; or the name of a file of conf/model, which is
            then loaded as the programs load it (weights, dtype, dtype of the cache).
        method: the name of a file of conf/method, or a `Method`.
        budget: tokens per layer at 16 bit (512), a share of each prompt's cache ("10%") or bytes ("64MiB").
        plan: a routing plan to follow instead of solving one; as text, the path of its JSON.
        calibration: a folder of artefacts as `pipelines.calibrate` leaves it.
        calibrate: True measures what is missing at the first prompt; a folder's path also keeps it there.
        budget_protocol: "matched" or "paper". budget_at: "prompt" or "peak". seed: of methods that draw.
        store_dtype: of 16-bit entries, "float32" too. None: what `moend.compress` takes for the model.
        rolling: tokens of a block of a rolling log-likelihood.
        **hf: everything else is an argument of the `hf` model (batch_size, dtype, revision, max_length, ...).

    Raises:
        UserError: a value that moend does not understand, in one line. Blocked: a calibration is missing.
    """

    def __init__(
        self,
        pretrained: Any,
        method: str | Method = "full",
        budget: object = "100%",
        *,
        plan: RoutingPlan | str | None = None,
        calibration: str | Path | None = None,
        calibrate: bool | str = False,
        budget_protocol: Protocol = "matched",
        budget_at: Moment = "prompt",
        store_dtype: str | None = None,
        seed: int = 0,
        rolling: int = 256,
        **hf: Any,
    ):
        self.method = named(method) if isinstance(method, str) else method
        self.budget = Budget.parse(budget)
        if isinstance(rolling, bool) or not isinstance(rolling, int) or rolling < 1:
            raise UserError(f"rolling={rolling} must be a whole number of tokens, at least 1")
        self.rolling = rolling
        made = self.method.make_scorer()
        repeats = made is not None and bool(set(made.observes) & set(OBSERVATIONS))
        if repeats and hf.get("batch_size") not in (None, 1, "1"):
            raise UserError(
                f"batch_size={hf['batch_size']}: {self.method.name} reads each context once more, one prompt at a time:"
                " set batch_size=1"
            )
        wording, dtype = "", _dtype(store_dtype)
        if isinstance(pretrained, str) and (models.conf_dir() / f"{pretrained}.yaml").is_file():
            pretrained, tokenizer, wording, stored = _packaged(pretrained, hf)
            hf["tokenizer"], dtype = tokenizer, dtype or stored
        super().__init__(pretrained, **hf)
        if self.backend != "causal":
            raise UserError(f"{type(self.model).__name__} is no decoder: moend compresses the cache of causal models")
        if isinstance(plan, str):
            plan = RoutingPlan.from_json(Path(plan).read_text(encoding="utf-8"), plan)
        self._longest_matters = self.method.schedule != "prompt" or budget_at == "peak"
        self._how: dict[str, Any] = {
            "plan": plan,
            "calibration": calibration,
            "calibrate": calibrate,
            "protocol": budget_protocol,
            "budget_at": budget_at,
            "store_dtype": dtype,
            "seed": seed,
            "tokenizer": self.tokenizer,
            "reconstruction": wording,
        }

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results: the model's, and how its caches were compressed."""
        from moend import __version__

        chosen = {"version": __version__, "method": self.method.name, "budget": str(self.budget)}
        chosen |= {k: str(self._how[k]) for k in ("protocol", "budget_at", "seed")}
        return {**super().get_model_info(), "moend": chosen | {"rolling": self.rolling}}

    @contextlib.contextmanager
    def _compressing(self, new: int) -> Iterator[None]:
        """Prompts are compressed in here. new: tokens that follow a prompt at most."""
        with compress(self.model, self.method, str(self.budget), max_new_tokens=new, **self._how):
            yield

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        """As for `hf`, the prompts compressed."""
        with self._compressing(max_length - context.shape[1]):
            out: Tensor = super()._model_generate(context, max_length, stop, **kwargs)
        return out

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of each request's continuation.

        requests: (texts, context, continuation). A window of a rolling log-likelihood has no texts.
        """
        pieces: list[list[tuple[Ids, Ids]]] = []
        for texts, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens cannot be scored: 1 to {self.max_length} can"
                )
            whole = tuple([*context, *continuation][-(self.max_length + 1) :])  # too long: cut from the left, as `hf`
            start = len(whole) - len(continuation)
            step = len(continuation) if texts is not None else self.rolling
            pieces.append([(whole[:i], whole[i : i + step]) for i in range(start, len(whole), step)])
        size = override_bs or self.batch_size
        if size == "auto":
            size = self._detect_batch_size()
        asked: dict[Ids, list[Ids]] = {}
        for before, after in dict.fromkeys(itertools.chain.from_iterable(pieces)):
            asked.setdefault(before, []).append(after)
        scored = self._scored(asked, int(size), disable_tqdm or self.rank != 0)
        answers = []
        for (texts, _, _), mine in zip(requests, pieces, strict=True):
            answer = (sum(scored[p][0] for p in mine), all(scored[p][1] for p in mine))
            if texts is not None:  # of a rolling log-likelihood the caller keeps the sum
                self.cache_hook.add_partial("loglikelihood", texts, answer)
            answers.append(answer)
        return answers

    def _scored(self, asked: dict[Ids, list[Ids]], size: int, quiet: bool) -> Scored:
        """Scores of the continuations of each context; `size` contexts are read together, long ones first.

        Where what follows a prompt decides what is kept of it, contexts share a batch only if equally much follows
        them: a score never depends on the company.
        """

        def follows(context: Ids) -> int:
            return max(map(len, asked[context])) if self._longest_matters else 0

        found: Scored = {}
        queue = sorted(asked, key=lambda c: (follows(c), -len(c), c))
        bar = tqdm(total=len(queue), disable=quiet, desc="Compressing contexts")
        for longest, group in itertools.groupby(queue, follows):
            for contexts in _batched(group, size):
                new = longest or max(len(c) for context in contexts for c in asked[context])
                with torch.no_grad(), self._mixed(), self._compressing(new):
                    cache, first = self._prefilled(contexts)
                    for row, context in enumerate(contexts):
                        for some in _batched(asked[context], size):
                            held = cache.take([row] * len(some))
                            judged = self._judged(held, first[row], len(context), some)
                            found |= {(context, c): score for c, score in zip(some, judged, strict=True)}
                bar.update(len(contexts))
        bar.close()
        return found

    def _mixed(self) -> Any:
        wanted = self.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=wanted, enabled=wanted is not None)

    def _prefilled(self, contexts: Sequence[Ids]) -> tuple[CompressedCache, Tensor]:
        """What is kept of contexts, left-padded into one batch, and the logits (B, V) of the token after each."""
        longest = max(map(len, contexts))
        padded = [[0] * (longest - len(c)) + list(c) for c in contexts]
        real = [[0] * (longest - len(c)) + [1] * len(c) for c in contexts]
        ids, mask = (torch.tensor(x, device=self.device) for x in (padded, real))
        out = self.model(input_ids=ids, attention_mask=mask, use_cache=True)
        return out.past_key_values, out.logits[:, -1]

    def _judged(
        self, cache: CompressedCache, first: Tensor, start: int, continuations: Sequence[Ids]
    ) -> list[tuple[float, bool]]:
        """Scores of continuations of one context, each fed to its own sequence of `cache`.

        first (V): logits of the token after the context, which all begin with. start: its position. Shorter
        continuations are padded on the right, where nothing that counts can see it.
        """
        longest = max(map(len, continuations))
        wanted = torch.tensor([[*c, *[0] * (longest - len(c))] for c in continuations], device=self.device)
        logits = first.expand(len(continuations), 1, -1)
        if longest > 1:
            at = torch.arange(start, start + longest - 1, device=self.device).expand(len(continuations), -1)
            fed = {"input_ids": wanted[:, :-1], "position_ids": at, "use_cache": True}
            logits = torch.cat([logits, self.model(**fed, **{cache_argument(self.model): cache}).logits], dim=1)
        chances = F.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        each = chances.gather(-1, wanted[..., None])[..., 0]
        greedy = chances.argmax(-1) == wanted
        return [(float(each[i, : len(c)].sum()), bool(greedy[i, : len(c)].all())) for i, c in enumerate(continuations)]


def _batched(items: Iterable[Ids], size: int) -> Iterator[list[Ids]]:
    """Lists of `size` items; the last may be shorter."""
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch


def _dtype(name: str | None) -> torch.dtype | None:
    """The type of a cache's entries by its name."""
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name is not None and name not in known:
        raise unknown("store_dtype", str(name), known)
    return None if name is None else known[name]


def _packaged(name: str, hf: dict[str, Any]) -> tuple[Any, Any, str, torch.dtype]:
    """(model, tokenizer, KVZip's words, dtype of entries) of a file of conf/model; it says how it is loaded itself."""
    changes = {k: hf.pop(k) for k in ("dtype", "device", "revision", "gguf_file", "trust_remote_code") if hf.get(k)}
    if str(changes.get("device", "")).startswith("cuda") and not torch.cuda.is_available():
        del changes["device"]  # lm_eval's own default on every machine
    cache = Path(os.environ.get("MOEND_CACHE", "~/.cache/moend")).expanduser()
    loaded = models.load(models.spec(name, **changes), cache)
    return loaded.model, loaded.tokenizer, loaded.spec.reconstruction, loaded.store_dtype


def main() -> int:
    """lm_eval's own command line, which then knows `--model moend`; a mistake is one line and exit code 2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as e:
        print(e, file=sys.stderr)
        return 2
    return 0
