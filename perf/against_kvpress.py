"""moend against NVIDIA's kvpress and transformers' QuantizedCache: same model, same prompts, same machine, one run.

    python3 -m venv PEER && PEER/bin/pip install torch==2.13.0 && PEER/bin/pip install -r perf/kvpress-requirements.txt
    OMP_NUM_THREADS=1 python -m perf.against_kvpress --peer PEER/bin/python --json comparison.json

kvpress needs another transformers than moend, so it runs as a process of its own (`perf/kvpress_peer.py`) on the same
safetensors folder and gets the token ids of our prompts. Five parts, each replaces its own in the JSON file:

    settings    seconds of one kvpress cell by arithmetic and attention: which setting is its best on this machine
    kept        which entries both keep, layer by layer and head by head, ours set to kvpress' formulas
    sweep       SnapKV, StreamingLLM, Knorm, TOVA, PyramidKV and H2O at three shares on needle prompts: scores, seconds
    memory      how far the same sweep on one example raises a fresh process above the loaded model
    quantised   our packed cache against QuantizedCache: errors, bytes held, agreement of the next token

`sweep` alternates: for every example and repeat one side runs all its cells and then the other, who is first changes.
Both sides hold a loaded model, run one at a time, on `--threads` threads. `--page FILE` writes the page from the JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf.kvpress_page import page

PARTS = ("settings", "kept", "sweep", "memory", "quantised")
SWEEP = ("SnapKV", "StreamingLLM", "Knorm", "TOVA", "PyramidKV", "H2O")
SCRIPT = Path(__file__).parent / "kvpress_peer.py"
NEW_TOKENS = 16
PLAIN, ONE_RULE = "as they are", "one rule"


@dataclass(frozen=True)
class Pair:
    """One method on both sides.

    ours: the method's name here, changes: what is set otherwise, `scorer` merged into its own; press, settings:
    kvpress' class and arguments. attention: what kvpress needs. counts: how kvpress arrives at the number of entries
    it keeps.
    """

    ours: str
    press: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    counts: str = "uniform"  # uniform | pyramid | heads | all

    def spec(self, keep: float) -> dict[str, Any]:
        """The press as `kvpress_peer` reads it."""
        ratio = {"compression_ratio": 1 - keep}
        if self.counts == "heads":
            inner = {"press": "SnapKVPress", "settings": {**self.settings, **ratio}}
            return {"press": self.press, "settings": {"press": inner}}
        return {"press": self.press, "settings": {**self.settings, **ratio}}

    def method(self) -> Any:
        """Our method, set to kvpress' formula."""
        from moend.methods.spec import method

        plain = method(self.ours)
        changes = dict(self.changes)
        changes["scorer"] = {**(plain.scorer or {}), **changes.get("scorer", {})}
        return dataclasses.replace(plain, **changes)

    def command(self) -> str:
        """The same on the command line."""
        parts = [f"method={self.ours}"]
        for key, value in self.changes.items():
            inner = value.items() if isinstance(value, Mapping) else [("", value)]
            parts += [f"method.{key}{'.' if k else ''}{k}={v}" for k, v in inner]
        return " ".join(parts)


def snapkv(window: int, name: str = "SnapKV", press: str = "SnapKVPress", counts: str = "uniform") -> Pair:
    """SnapKV, or a method with its scores, at one window on both sides."""
    changes = {"scorer": {"window": window}, "recent": window}
    return Pair(name, press, {"window_size": window}, changes, counts=counts)


PAIRS = {
    "SnapKV": snapkv(64),
    "SnapKV, window 32": snapkv(32),
    "StreamingLLM": Pair("StreamingLLM", "StreamingLLMPress", changes={"schedule": "prompt"}),
    "Knorm": Pair("Knorm", "KnormPress"),
    "TOVA": Pair("TOVA", "TOVAPress", changes={"schedule": "prompt", "recent": 1}),
    "PyramidKV": snapkv(8, "PyramidKV", "PyramidKVPress", "pyramid"),
    "PyramidKV, window 64": snapkv(64, "PyramidKV", "PyramidKVPress", "pyramid"),
    "AdaKV": snapkv(64, "AdaKV", "AdaKVPress", "heads"),
    "H2O": Pair(
        "H2O",
        "ObservedAttentionPress",
        changes={"scorer": {"average": True}, "schedule": "prompt", "recent": 0},
        attention="eager",
    ),
    "KVZip": Pair("KVZip", "KVzipPress", counts="all"),
}


def counts(pair: Pair, tokens: int, keep: float, layers: int) -> list[int]:
    """How many entries per head kvpress 0.5.5 keeps in each layer, by what its source says (mean where heads differ).

    Uniform: the whole part of tokens x (1 - ratio). Pyramid: with b = tokens x (1 - ratio) and window w the last layer
    gets b / 20 and the first 2 b minus that, the first at most tokens - w; where the last would get less than w, all
    layers get round(b).
    """
    share = 1 - (1 - keep)  # the rounding of the ratio and back is kvpress'
    if pair.counts != "pyramid":
        return [max(1, int(tokens * share))] * layers
    b, window = tokens * share, int(pair.settings["window_size"])
    last, first = b / 20, 2 * b - b / 20
    if first >= tokens - window:
        first, last = tokens - window, 2 * b - (tokens - window)
    if not tokens >= first >= last >= window:
        return [max(1, round(b))] * layers
    return [round(first - i * (first - last) / (layers - 1)) for i in range(layers)]


class PeerError(RuntimeError):
    """The peer failed or ended; one line."""


class Peer:
    """The peer's process: `peer("answer", ids=...)` sends a request and waits for the answer."""

    def __init__(self, python: str, threads: int, script: Path = SCRIPT):
        env = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        try:
            self.process = subprocess.Popen(
                [python, "-I", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
            )
        except OSError as e:
            raise PeerError(f"the peer's python '{python}' does not start: {e.strerror}") from None

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"the peer ended with exit code {self.process.wait()} at '{do}'")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"the peer cannot '{do}': {answer['error']}")
        return answer

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()  # its loop ends with its input
        self.process.wait()
        self.process.stdout.close()


def overlap(ours: Any, theirs: Any, scores: Any = None) -> dict[str, float]:
    """How far two bool masks (L, H, T) of kept entries agree.

    Per layer and head: entries that both keep over the larger of both numbers; their mean and least, and the share of
    heads with no difference. gap: of entries that only one side keeps, the largest distance of our scores (L, H or 1,
    T) from the lowest score we keep, relative to it: rounding shows as a gap of about 1e-6.
    """
    import torch

    both, number = (ours & theirs).sum(-1), torch.maximum(ours.sum(-1), theirs.sum(-1))
    share = both / number.clamp(min=1)
    out = {
        "mean": float(share.mean()),
        "least": float(share.min()),
        "identical": float((share == 1).float().mean()),
        "ours": int(ours.sum()),
        "theirs": int(theirs.sum()),
        "different": int((ours ^ theirs).sum()),
    }
    if scores is not None:
        scores = scores.expand(ours.shape).double()
        cut = scores.masked_fill(~ours, torch.inf).amin(-1, keepdim=True)
        far = ((scores - cut).abs() / cut.abs().clamp(min=1e-300))[ours ^ theirs]
        out["gap"] = float(far.max()) if len(far) else 0.0
    return out


def hand_over(folder: Path, prompts: Mapping[str, Sequence[int]]) -> str:
    """Write token ids for the peer, by name; returns the file."""
    import torch
    from safetensors.torch import save_file

    path = folder / "ids.safetensors"
    save_file({name: torch.tensor(list(ids), dtype=torch.long) for name, ids in prompts.items()}, path)
    return str(path)


class Ours:
    """Our side: the model, its engine, and the cells. model: a file of conf/model, or a folder of safetensors."""

    def __init__(self, model: str, dtype: str, threads: int, store: str = "half", max_bytes: int | None = None):
        import torch
        from transformers.utils.logging import disable_progress_bar

        from moend.engine import Engine
        from moend.models import load as models

        torch.set_num_threads(threads)
        disable_progress_bar()
        self.cache = Path.home() / ".cache" / "moend"
        changes = {"dtype": dtype, "store_dtype": store}
        folder = {"id": model} if Path(model).is_dir() else {}
        self.spec = models.spec("hf" if folder else model, **changes, **folder)
        self.loaded = models.load(self.spec, self.cache)
        self.arch = self.loaded.arch
        self.engine = Engine(self.loaded, max_bytes=max_bytes)

    def folder(self) -> str:
        """The model's folder of safetensors."""
        from moend.models import load as models

        return str(models.fetch(self.spec, self.cache))

    def needles(self, count: int, length: int) -> tuple[Any, list[Any]]:
        """The needle benchmark and its first prompts, without gold answers: the peer scores none either."""
        from moend.benchmarks import benchmark

        bench = benchmark({"name": "niah", "type": "niah", "length": length, "limit": count})
        made = [bench.render(s, self.loaded.tokenizer, self.arch, chat=True) for s in bench.samples()]
        return bench, [dataclasses.replace(r, gold_ids=(), max_new_tokens=NEW_TOKENS) for r in made]

    def job(self, pair: Pair, keep: float, tokens: int) -> Any:
        """A cell that keeps as many of `tokens` entries as kvpress does."""
        from moend.budget import Budget
        from moend.decoding import Job
        from moend.methods.bind import bind
        from moend.plan import LayerPlan, RoutingPlan

        arch, given, budget = self.arch, None, Budget("ratio", keep)
        if pair.counts == "all":
            entries = arch.layers * arch.kv_heads * tokens
            entries -= int(entries * (1 - keep))
            budget = Budget("bytes", float(entries * (4 * arch.head_dim + 4)))
        else:
            layers = tuple(LayerPlan(n / tokens, n) for n in counts(pair, tokens, keep, arch.layers))
            given = RoutingPlan("", "", tokens, str(budget), "matched", "given", None, None, layers)
        bound = bind(
            pair.method(), budget, "matched", arch, t_ref=None, given=given, store_dtype=self.loaded.store_dtype
        )
        return Job(bound)

    def prefilled(self, rendered: Any, jobs: Sequence[Any], cut: int) -> Any:
        """The first `cut` tokens, run through the model once, with what all of these cells ask to see of it."""
        import torch

        from moend.cache import attention_of

        ids = list(rendered.ids)[:cut]
        with torch.no_grad(), attention_of(self.engine.model):
            return self.engine._observe(self.engine._prefill(ids, jobs), ids, jobs, rendered, NEW_TOKENS)

    def kept(self, prefilled: Any, job: Any) -> tuple[Any, Any]:
        """Mask (L, H, T) of what a cell keeps of a prefill, and the scores (L, H or 1, T) it was chosen by."""
        import torch

        cache = job.method.fork(prefilled, NEW_TOKENS, rotary=None, scaling=self.engine.scaling)
        mask = torch.zeros(self.arch.layers, self.arch.kv_heads, prefilled.length, dtype=torch.bool)
        for layer, rows in enumerate(cache.parts()):
            positions = [at for row in rows for at in row.true_positions().long().expand(row.heads, -1)]
            for head, at in enumerate(positions):
                mask[layer, head, at] = True
        scorer = repr(job.method.method.make_scorer())
        found = {layer: scores for (key, layer, _), scores in prefilled._scores.items() if key[0] == scorer}
        return mask, torch.stack([found[layer] for layer in range(self.arch.layers)])


def kept(ours: Ours, peer: Peer, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Part `kept`: overlap of what both keep for every pair and share, over the examples."""
    from safetensors.torch import load_file

    _, prompts = ours.needles(args.kept_examples, args.length)
    path = hand_over(folder, {r.sample.id: r.ids for r in prompts})
    prefix, out = peer("prefix")["tokens"], str(folder / "kept.safetensors")
    pairs = {name: pair for name, pair in PAIRS.items() if not args.methods or pair.ours in args.methods}
    found: dict[tuple[str, str, float], list[dict[str, float]]] = {}
    for rendered in prompts:

        def theirs(pair: Pair, keep: float, cut: int, name: str = rendered.sample.id) -> Any:
            asked = {"ids": path, "name": name, "cut": cut, "attention": pair.attention, "out": out}
            peer("kept", spec=pair.spec(keep), **asked)
            return load_file(out)["kept"]

        for (name, variant, keep), result in compare(ours, pairs, args.keeps, rendered, theirs, prefix):
            found.setdefault((name, variant, keep), []).append(result)
            print(json.dumps({"pair": name, "variant": variant, "keep": keep, **result}), file=sys.stderr)
    return {
        "examples": len(prompts),
        "length": args.length,
        "rows": [
            {"pair": name, "variant": variant, "keep": keep, **merged(found[name, variant, keep])}
            for name, variant, keep in sorted(found, key=lambda row: list(pairs).index(row[0]))
        ],
        "commands": {n: p.command() for n, p in PAIRS.items()},
        "presses": {n: [p.press, dict(p.settings)] for n, p in PAIRS.items()},
    }


def compare(
    ours: Ours,
    pairs: Mapping[str, Pair],
    keeps: Sequence[float],
    rendered: Any,
    theirs: Callable[[Pair, float, int], Any],
    prefix: int,
) -> Iterator[tuple[tuple[str, str, float], dict[str, float]]]:
    """Overlaps of one example: both as they are, and where the rules differ also with one rule for both.

    theirs(pair, keep, cut): the peer's mask (L, H, cut). prefix: tokens of the chat template before the user's text.
    """
    seen = {name: pair for name, pair in pairs.items() if pair.counts != "all"}
    cut = len(rendered.ids) - 1
    prefilled = ours.prefilled(rendered, [ours.job(p, 0.5, cut) for p in seen.values()], cut) if seen else None
    for name, pair in seen.items():
        for keep in keeps:
            by_rule, mask = counts(pair, cut, keep, ours.arch.layers), theirs(pair, keep, cut)
            if pair.counts != "heads" and mask.sum(-1)[:, 0].tolist() != by_rule:
                raise PeerError(f"{pair.press} keeps {mask.sum(-1)[:, 0].tolist()} entries, its rule says {by_rule}")
            own, scores = ours.kept(prefilled, ours.job(pair, keep, cut))
            yield (name, PLAIN, keep), overlap(own, mask, scores)
            if pair.counts == "heads":
                yield (name, ONE_RULE, keep), overlap(with_floor(scores, by_rule[0]), mask, scores)
    for name, pair in pairs.items():
        if pair.counts == "all":
            yield from compare_kvzip(ours, name, pair, keeps, rendered, theirs, prefix)


def compare_kvzip(
    ours: Ours,
    name: str,
    pair: Pair,
    keeps: Sequence[float],
    rendered: Any,
    theirs: Callable[[Pair, float, int], Any],
    prefix: int,
) -> Iterator[tuple[tuple[str, str, float], dict[str, float]]]:
    """The question is unseen. One rule for both is made of kvpress' context and request and of our sinks.

    kvpress takes all behind the template's first words for context and asks within a turn of the chat; ours begins at
    the benchmark's own context and asks plainly. What comes before the context are sinks here, in attention and in
    selection; kvpress has 4 and can be told another number.
    """
    cut = rendered.context_tokens
    loaded = ours.engine.loaded
    spec = dataclasses.replace(loaded.spec, reconstruction=request(loaded.tokenizer))
    for variant in (PLAIN, ONE_RULE):
        if variant == ONE_RULE:
            rendered = dataclasses.replace(rendered, context_start=prefix)
            pair = dataclasses.replace(pair, settings={"n_sink": prefix})
            ours.engine.loaded = dataclasses.replace(loaded, spec=spec)
        try:
            prefilled = ours.prefilled(rendered, [ours.job(pair, 0.5, cut)], cut)
        finally:
            ours.engine.loaded = loaded
        for keep in keeps:
            own, scores = ours.kept(prefilled, ours.job(pair, keep, cut))
            yield (name, variant, keep), overlap(own, theirs(pair, keep, cut), scores)


def with_floor(scores: Any, keep: int, floor: float = 0.2) -> Any:
    """kvpress' AdaKV: in each layer floor x keep of every head's best, then the layer's best, H x keep in all."""
    import torch

    from moend.allocation.global_topk import head_tokens

    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for layer, of_heads in enumerate(scores):
        (numbers,) = head_tokens([of_heads], len(of_heads) * keep, max(1, int(keep * floor)))
        for head, number in enumerate(numbers):
            mask[layer, head, of_heads[head].topk(number).indices] = True
    return mask


def request(tokenizer: Any) -> str:
    """KVZip's request as kvpress words it: the end of the user's turn and the start of the answer behind it."""
    from moend.replay import FIRST

    turn = [{"role": "user", "content": "MARK"}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return FIRST + str(text.split("MARK")[1])


def merged(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One row of several examples: sums of numbers, the worst least and gap, means of the rest."""
    out: dict[str, float] = {}
    for key in results[0]:
        values = [r[key] for r in results]
        if key in ("ours", "theirs", "different"):
            out[key] = sum(values)
        elif key in ("least", "gap"):
            out[key] = min(values) if key == "least" else max(values)
        else:
            out[key] = sum(values) / len(values)
    return out


def cells(args: argparse.Namespace) -> list[tuple[str, float]]:
    """The sweep's cells: method by method."""
    return [(name, keep) for name in args.methods or SWEEP for keep in args.keeps]


def sweep(ours: Ours, peer: Peer, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Part `sweep`: texts and scores of the first repeat; seconds of every turn (one example on each side)."""
    bench, prompts = ours.needles(args.examples, args.length)
    path = hand_over(folder, {r.sample.id: r.ids for r in prompts})
    texts: dict[str, dict[tuple[str, float], list[str]]] = {"ours": {}, "kvpress": {}}
    spent: list[dict[str, list[float]]] = []
    per_method: dict[str, float] = dict.fromkeys(args.methods or SWEEP, 0.0)

    def run_ours(rendered: Any, repeat: int, cut: int) -> None:
        begin = time.perf_counter(), time.process_time()
        jobs = [ours.job(PAIRS[name], keep, cut) for name, keep in cells(args)]
        outcomes = ours.engine.run(rendered, jobs, question_visible=args.question == "visible")
        passed = time.perf_counter() - begin[0], time.process_time() - begin[1]
        spent[-1]["ours"] = list(passed)
        if repeat == 0:
            for cell, outcome in zip(cells(args), outcomes, strict=True):
                texts["ours"].setdefault(cell, []).append(outcome.text)

    def run_peer(rendered: Any, repeat: int, cut: int) -> None:
        spent[-1]["kvpress"] = [0.0, 0.0]
        for name, keep in cells(args):
            pair = PAIRS[name]
            answer = peer(
                "answer",
                ids=path,
                name=rendered.sample.id,
                cut=cut,
                spec=pair.spec(keep),
                attention=pair.attention,
                new_tokens=NEW_TOKENS,
            )
            spent[-1]["kvpress"][0] += answer["wall"]
            spent[-1]["kvpress"][1] += answer["cpu"]
            per_method[name] += answer["cpu"]
            if repeat == 0:
                texts["kvpress"].setdefault((name, keep), []).append(answer["text"])

    warm_up(ours, prompts[0])
    warm_up_peer(peer, path, prompts[0].sample.id)
    for repeat in range(args.repeats):
        for rendered in prompts:
            cut = len(rendered.ids) - 1 if args.question == "visible" else rendered.context_tokens
            spent.append({})
            for side in (run_ours, run_peer) if len(spent) % 2 else (run_peer, run_ours):
                side(rendered, repeat, cut)
            now = {k: [round(x, 1) for x in v] for k, v in spent[-1].items()}
            print(f"turn {len(spent)} {now}", file=sys.stderr)
    samples = [r.sample for r in prompts]
    rows = [scored(bench, samples, cell, texts["ours"][cell], texts["kvpress"][cell]) for cell in cells(args)]
    return {
        "examples": len(prompts),
        "repeats": args.repeats,
        "length": args.length,
        "question": args.question,
        "new_tokens": NEW_TOKENS,
        "store": args.store,
        "max_mib": args.max_mib,
        "seconds": spent,
        **ratios(spent),
        "cpu_by_method": {k: round(v, 1) for k, v in per_method.items()},
        "rows": rows,
    }


def warm_up(ours: Ours, rendered: Any) -> None:
    """A short prompt through our side: imports, compiled code and first allocations are nobody's time or memory."""
    short = dataclasses.replace(rendered, ids=rendered.ids[:256], context_tokens=128)
    ours.engine.run(short, [ours.job(PAIRS[SWEEP[0]], 0.5, 255)])


def warm_up_peer(peer: Peer, path: str, name: str) -> None:
    """The same for kvpress."""
    peer("answer", ids=path, name=name, cut=255, spec=PAIRS["SnapKV"].spec(0.5), attention="sdpa", new_tokens=1)


def ratios(spent: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """kvpress' seconds over ours: of all turns together, and turn by turn with the median."""
    kinds = list(enumerate(("wall", "cpu")))
    made = {kind: [round(r["kvpress"][i] / r["ours"][i], 2) for r in spent] for i, kind in kinds}
    total = {
        kind: round(sum(r["kvpress"][i] for r in spent) / sum(r["ours"][i] for r in spent), 2) for i, kind in kinds
    }
    return {"ratios": made, "ratio": {kind: round(statistics.median(x), 2) for kind, x in made.items()}, "total": total}


def scored(
    bench: Any, samples: Sequence[Any], cell: tuple[str, float], ours: Sequence[str], theirs: Sequence[str]
) -> dict[str, Any]:
    """Scores of one cell on both sides with 95 % intervals, their paired difference, and equal answers."""
    from moend.statistics import mcnemar_exact, paired_share, wilson

    mine, peers = (
        [float(bench.score(s, t)["score"]) for s, t in zip(samples, texts, strict=True)] for texts in (ours, theirs)
    )
    n = len(samples)
    won = sum(a > b for a, b in zip(mine, peers, strict=True))
    lost = sum(a < b for a, b in zip(mine, peers, strict=True))

    def with_interval(scores: Sequence[float]) -> list[float]:
        interval = wilson(sum(scores), n)
        return [sum(scores) / n, interval.low, interval.high]

    difference = paired_share(won, lost, n)
    return {
        "method": cell[0],
        "keep": cell[1],
        "n": n,
        "ours": with_interval(mine),
        "kvpress": with_interval(peers),
        "difference": [(won - lost) / n, difference.low, difference.high],
        "p": mcnemar_exact(mine, peers),
        "same_text": sum(a.strip() == b.strip() for a, b in zip(ours, theirs, strict=True)) / n,
    }


def best_settings(python: str, args: argparse.Namespace) -> dict[str, Any]:
    """Part `settings`: seconds of one kvpress cell (SnapKV at a quarter) by arithmetic and attention, best of two."""
    rows = []
    ours = make_ours(args)
    _, (rendered,) = ours.needles(1, args.length)
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder, Peer(python, args.threads) as peer:
            path = hand_over(Path(folder), {"one": rendered.ids})
            peer("load", model=ours.folder(), dtype=dtype, threads=args.threads)
            for attention in ("sdpa", "eager"):
                asked = {"ids": path, "name": "one", "cut": len(rendered.ids) - 1, "attention": attention}
                answers = [
                    peer("answer", spec=PAIRS["SnapKV"].spec(0.25), new_tokens=NEW_TOKENS, **asked) for _ in range(2)
                ]
                seconds = {kind: min(a[kind] for a in answers) for kind in ("wall", "cpu")}
                rows.append({"dtype": dtype, "attention": attention, **seconds})
                print(json.dumps(rows[-1]), file=sys.stderr)
    return {"length": args.length, "rows": rows}


def memory(peer_python: str, args: argparse.Namespace) -> dict[str, Any]:
    """Part `memory`: bytes above the loaded model, each side in a fresh process, one example of the sweep.

    kvpress: the highest of its cells, and by method. Ours: all cells of the sweep together, as they run.
    """
    made: dict[str, Any] = {}
    for title, methods in (("all", args.methods or list(SWEEP)), ("without H2O", [m for m in SWEEP if m != "H2O"])):
        if title != "all" and args.methods:
            continue
        asked = argparse.Namespace(**{**vars(args), "methods": methods})
        made[title] = {"ours": ours_in_a_process(asked), "kvpress": peer_memory(peer_python, asked)}
        print(title, json.dumps(made[title]), file=sys.stderr)
    return {"cells": len(SWEEP) * len(args.keeps), "length": args.length, "max_mib": args.max_mib, "peaks": made}


def ours_in_a_process(args: argparse.Namespace) -> int:
    """Our peak, measured by this program in a process of its own."""
    command = [sys.executable, "-m", "perf.against_kvpress", "--measure", json.dumps(vars(args), default=str)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(json.loads(done.stdout)["peak"])


def measure(settings: Mapping[str, Any]) -> dict[str, int]:
    """In that process: how far one example of the sweep raises this process above what it held."""
    from perf.meter import peak_of, release

    args = argparse.Namespace(**settings)
    ours = make_ours(args)
    _, (rendered,) = ours.needles(1, args.length)
    jobs = [ours.job(PAIRS[name], keep, len(rendered.ids) - 1) for name, keep in cells(args)]
    warm_up(ours, rendered)
    release()
    return {"peak": peak_of(lambda: ours.engine.run(rendered, jobs))}


def peer_memory(python: str, args: argparse.Namespace) -> dict[str, Any]:
    """The peer's peaks above its loaded model: of all cells, and the highest of each method."""
    ours = make_ours(args)
    _, (rendered,) = ours.needles(1, args.length)
    with tempfile.TemporaryDirectory() as folder, Peer(python, args.threads) as peer:
        path = hand_over(Path(folder), {"one": rendered.ids})
        peer("load", model=ours.folder(), dtype=args.peer_dtype, threads=args.threads)
        warm_up_peer(peer, path, "one")
        before, peaks = peer("rss")["rss"], dict.fromkeys(args.methods, 0)
        for name, keep in cells(args):
            pair = PAIRS[name]
            answer = peer(
                "answer",
                ids=path,
                name="one",
                cut=len(rendered.ids) - 1,
                spec=pair.spec(keep),
                attention=pair.attention,
                new_tokens=NEW_TOKENS,
            )
            peaks[name] = max(peaks[name], answer["peak"] - before)
    return {"peak": max(peaks.values()), "by_method": peaks}


# backend, bits, axis: quanto takes 0 (its default here); hqq's documentation asks for 1
QUANTISED = (("hqq", 8, 1), ("hqq", 4, 1), ("hqq", 2, 1), ("quanto", 4, 0), ("quanto", 2, 0))


def quantised(ours: Ours, peer: Peer, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Part `quantised`: errors, bytes and agreement on running text, all tokens kept.

    A multiple of 64 tokens is quantised: hqq cannot pack an odd number of groups.
    """
    from moend.benchmarks import benchmark

    bench = benchmark({"name": "continuation", "type": "continuation", "length": args.text_length + 1})
    prompts = [
        bench.render(s, ours.loaded.tokenizer, ours.arch, chat=False) for s in bench.samples()[: args.text_examples]
    ]
    path = hand_over(
        folder,
        {f"{r.sample.id}{end}": ids for r in prompts for end, ids in (("", r.ids), ("+", r.gold_ids))},
    )
    rows: list[dict[str, Any]] = []

    def add(name: str, bits: int, results: list[dict[str, Any]]) -> None:
        agree = [x for r in results for x in r["agree"]]
        made: dict[str, Any] = {"cache": name, "bits": bits, "agree": sum(agree) / len(agree), "tokens": len(agree)}
        for key in ("error_k", "error_v", "codes", "scales"):
            made[key] = statistics.mean(r[key] for r in results)
        made["nll"] = [statistics.mean(r["nll"][i] for r in results) for i in (0, 1)]
        rows.append(made)
        print(json.dumps(made), file=sys.stderr)

    for bits in (8, 4, 2):
        for title, window in (("moend", 0), ("moend, 16-bit window", None)):
            add(title, bits, [packed(ours, r, bits, window) for r in prompts])
    for backend, bits, axis in QUANTISED:
        add(
            f"{backend}, axis {axis}",
            bits,
            [
                peer(
                    "quantise",
                    ids=path,
                    name=r.sample.id,
                    follow=f"{r.sample.id}+",
                    backend=backend,
                    bits=bits,
                    axis=axis,
                    group=64,
                    residual=256,
                )
                for r in prompts
            ],
        )
    return {
        "examples": len(prompts),
        "tokens": args.text_length,
        "followed": len(prompts[0].gold_ids),
        "full_bytes": ours.arch.full_bytes(args.text_length),
        "rows": rows,
    }


def packed(ours: Ours, rendered: Any, bits: int, window: int | None) -> dict[str, Any]:
    """Our packed cache with all tokens kept: the same figures as `kvpress_peer.Peer.quantise`."""
    import torch

    from moend.budget import Budget
    from moend.cache import attention_of, cache_argument
    from moend.methods.bind import bind
    from moend.methods.spec import method

    model, (*ids, last), follow = ours.engine.model, rendered.ids, list(rendered.gold_ids)
    fed = torch.tensor([[last, *follow[:-1]]])
    at = torch.arange(len(ids), len(ids) + fed.shape[1])[None]
    full = method("full")
    quantising = method("full", precision={"k_bits": bits, "v_bits": bits}, window=window, always_quantise=True)
    logits, caches = [], []
    with torch.no_grad(), attention_of(model):
        prefilled = ours.engine._prefill(ids, [])
        for m in (full, quantising):
            room = Budget("tokens", 2 * (len(ids) + len(follow)))  # more than all, so that nothing is dropped
            bound = bind(m, room, "matched", ours.arch, t_ref=None, store_dtype=torch.float32)
            cache = bound.fork(prefilled, len(follow), rotary=None, scaling=ours.engine.scaling)
            caches.append([row for (row,) in cache.parts()])
            call = {cache_argument(model): cache}
            logits.append(model(input_ids=fed, position_ids=at, use_cache=True, **call).logits[0])
    target = torch.tensor(follow)[:, None]
    errors = {}
    for side, pick in (("error_k", 0), ("error_v", 1)):
        pairs = [(a.dense(torch.float32)[pick], b.dense(torch.float32)[pick]) for a, b in zip(*caches, strict=True)]
        wrong = sum(float((a - b).square().sum()) for a, b in pairs)
        errors[side] = (wrong / sum(float(a.square().sum()) for a, _ in pairs)) ** 0.5
    codes = 0
    for row in caches[1]:
        # what is at 16 bit is counted as it is by default stored, two bytes
        codes += sum(p.codes.nbytes for p in [*row.k_packed, *([row.v_packed] if row.v_packed else [])])
        codes += 2 * (row.k_window.numel() + row.v_window.numel())
    scales = sum(t.nbytes for row in caches[1] for p in [*row.k_packed, row.v_packed] if p for t in p.tensors()[1:])
    return {
        **errors,
        "codes": codes,
        "scales": scales,
        "agree": [bool(x) for x in logits[0].argmax(-1) == logits[1].argmax(-1)],
        "nll": [float(-x.log_softmax(-1).gather(1, target).mean()) for x in logits],
    }


def make_ours(args: argparse.Namespace) -> Ours:
    """Our side by the program's arguments."""
    return Ours(
        args.model, args.dtype, args.threads, args.store, None if args.max_mib is None else args.max_mib * 2**20
    )


def update(path: Path, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Put parts into a JSON file that may hold others; returns all."""
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    report |= parts
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(report, indent=1) + "\n")
    fresh.rename(path)
    return report


def parser() -> argparse.ArgumentParser:
    """The program's arguments."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--peer", help="python of the environment with kvpress (not needed for --page alone)")
    made.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    made.add_argument("--json", type=Path, default=Path("comparison.json"), help="results; other parts in it stay")
    made.add_argument("--page", type=Path, help="write the page from the JSON file")
    made.add_argument("--examples", type=int, default=20, help="needle prompts of the sweep")
    made.add_argument("--kept-examples", type=int, default=2)
    made.add_argument("--text-examples", type=int, default=4, help="texts of part quantised")
    made.add_argument("--repeats", type=int, default=1, help="turns of each example")
    made.add_argument("--length", type=int, default=2048)
    made.add_argument("--text-length", type=int, default=1024, help="quantised tokens, a multiple of 64")
    made.add_argument("--keeps", type=float, nargs="+", default=[0.1, 0.25, 0.5], help="shares of the entries")
    made.add_argument("--methods", nargs="+", help=f"of the sweep, default {' '.join(SWEEP)}")
    made.add_argument("--question", choices=("visible", "unseen"), default="visible")
    made.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="our arithmetic")
    made.add_argument("--peer-dtype", default="float32", choices=("float32", "bfloat16"), help="kvpress' arithmetic")
    made.add_argument("--store", default="half", choices=("half", "model"), help="what our 16-bit entries are held in")
    made.add_argument("--max-mib", type=int, help="engine.max_bytes of our side in MiB")
    made.add_argument("--model", default="smollm2_135m", help="of conf/model, or a folder of safetensors")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--machine", default="two x86 cores", help="words for the page")
    made.add_argument("--measure", help=argparse.SUPPRESS)
    return made


def run(args: argparse.Namespace) -> Iterable[tuple[str, Any]]:
    """The parts that were asked for, one after the other."""
    import torch
    import transformers

    arithmetic = {"dtype": args.dtype, "peer_dtype": args.peer_dtype}
    if "settings" in args.parts:
        yield "settings", best_settings(args.peer, args)
    if "memory" in args.parts:
        yield "memory", memory(args.peer, args) | arithmetic
    with tempfile.TemporaryDirectory() as name, Peer(args.peer, args.threads) as peer:
        ours, folder = make_ours(args), Path(name)
        versions = peer("load", model=ours.folder(), dtype=args.peer_dtype, threads=args.threads)["versions"]
        yield (
            "setting",
            {
                "date": time.strftime("%Y-%m-%d"),
                "machine": args.machine,
                "threads": args.threads,
                "model": ours.spec.label,
                "ours": {"torch": torch.__version__, "transformers": transformers.__version__},
                "peer": versions,
            },
        )
        for part, function in (("kept", kept), ("quantised", quantised), ("sweep", sweep)):
            if part in args.parts:
                yield titled(part, args), function(ours, peer, args, folder) | arithmetic


def titled(part: str, args: argparse.Namespace) -> str:
    """A part's place in the JSON file: sweeps of another question mode or arithmetic stand beside the first."""
    if part != "sweep":
        return part
    apart = [args.question] * (args.question == "unseen") + [args.dtype] * (args.dtype != "float32")
    return " ".join([part, *apart])


def main() -> int:
    """Run the parts, write the JSON after each, and the page."""
    args = parser().parse_args()
    if args.measure:
        print(json.dumps(measure(json.loads(args.measure))))
        return 0
    if not args.peer and (args.parts and not args.page):
        print("--peer is needed: the python of an environment with kvpress", file=sys.stderr)
        return 2
    try:
        for part, result in run(args) if args.peer else ():
            update(args.json, {part: result})
    except PeerError as e:
        print(e, file=sys.stderr)
        return 1
    if args.page:
        args.page.write_text(page(json.loads(args.json.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
