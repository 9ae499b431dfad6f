"""The engine on the small trained model: exactness, fusion, bytes at three points, sampling, question modes."""

from __future__ import annotations

import dataclasses
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from moend.benchmarks import benchmark
from moend.benchmarks.base import Rendered, Sample
from moend.budget import Budget
from moend.cache import LayerKV
from moend.calibration.artefact import Artefact
from moend.calibration.damage import DamageSettings
from moend.calibration.queries import TrigStatistics
from moend.calibration.sensitivity import encode, measure
from moend.decoding import Decoder, Generation, Job, Outcome
from moend.engine import Engine, stable_seed
from moend.errors import UserError
from moend.layer_bytes import layer_bytes
from moend.methods.bind import BoundMethod, bind
from moend.methods.spec import method, method_names
from moend.models import load as models
from moend.plan import Config, extend_lattice, lattice
from moend.scoring import scorer
from tests.tiny import tiny

FAMILY = ["1d", "2d_uniform", "2d", "2d_hetero"]
UNIFORM = [*FAMILY, "SnapKV", "StreamingLLM", "Random", "H2O", "PyramidKV", "RippleKV", "TOVA", "RKV", "Knorm", "AdaKV"]
KEEPS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load(models.spec("recall_moe"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def artefacts(loaded: Any) -> dict[str, Artefact]:
    ids = torch.tensor([models.calibration_ids(loaded)])
    queries = TrigStatistics.measure(loaded.model, ids).tensors()
    configs = lattice(extend_lattice(KEEPS))
    table = measure(loaded.model, ids, configs, scorer=scorer("trig"), statistics=queries)
    return {
        "queries": Artefact("queries", {}, queries, {}),
        "sensitivity": Artefact("sensitivity", {}, table.tensors(), {}),
        "damage": damage(),
        "ripple": Artefact("ripple", {}, {k: torch.tensor([[3.0, 1.0, 9.0, 0.0]]) for k in ("response", "local")}, {}),
    }


def damage() -> Artefact:
    """Of a model that needs its third layer."""
    configs = [Config(*c) for c in DamageSettings().configs]
    loss = torch.tensor([1 - c.keep + 0.1 / c.k_bits for c in configs], dtype=torch.float64)
    table = torch.tensor([[3.0], [1.0], [9.0], [0.1]]) * loss
    heads = torch.stack([table * 0.1, table * 0.9], dim=1)
    return Artefact("damage", {}, {"table": table, "heads": heads, "configs": encode(configs)})


@pytest.fixture(scope="module")
def examples(loaded: Any) -> list[Rendered]:
    bench = benchmark({"name": "recall", "type": "recall", "length": 256, "rows": 1})
    return [bench.render(s, loaded.tokenizer, loaded.arch, chat=False) for s in bench.samples()]


def cell(
    loaded: Any, artefacts: Any, name: str, budget: object, *, dtype: Any = None, at: str = "prompt", **fields: Any
) -> BoundMethod:
    return bind(
        method(name, **fields),
        Budget.parse(budget),
        "matched",
        loaded.arch,
        t_ref=None,
        artefacts=artefacts,
        store_dtype=dtype or loaded.store_dtype,
        at=at,
    )


def same(a: Outcome, b: Outcome) -> bool:
    """Equal but for times, how many decoded together, and rounding of log-likelihoods."""
    skip = {"fused_rows", "prefill_seconds", "select_seconds", "decode_seconds", "peak_bytes", "answer_nll"}
    da, db = dataclasses.asdict(a), dataclasses.asdict(b)
    close = abs((a.answer_nll or 0) - (b.answer_nll or 0)) < 5e-3  # a rounding may move a code of 2 bits
    return close and all(da[k] == db[k] for k in da if k not in skip)


@pytest.mark.req(3)
@pytest.mark.parametrize("visible", [True, False])
def test_room_for_all_gives_full_s_tokens(loaded, artefacts, examples, visible):
    names = method_names()
    jobs = [Job(cell(loaded, artefacts, n, "1e9", dtype=torch.float32)) for n in names]
    for example in examples[:3]:
        outs = Engine(loaded).run(example, jobs, question_visible=visible)
        full = outs[names.index("full")]
        assert all(o.token_ids == full.token_ids for o in outs)
        assert not any(o.compressed for o in outs)
        assert all(o.effective_keep == [1.0] * 4 for o in outs)


@pytest.mark.req(3)
def test_full_is_the_stock_model(loaded, artefacts, examples):
    for example in examples[:3]:
        out = Engine(loaded).run(example, [Job(cell(loaded, artefacts, "full", 1, dtype=torch.float32))])[0]
        ids = torch.tensor([example.ids])
        stock = loaded.model.generate(ids, max_new_tokens=example.max_new_tokens, do_sample=False)
        assert out.token_ids == stock[0, ids.shape[1] :].tolist()
        assert out.finish_reason == "eos"


def every_way(n: str, visible: bool) -> list[dict[str, Any]]:
    """A method as it is, and, where it evicts while decoding, so often that it does within a short answer."""
    asked = {"scorer": {"mode": "recon"}} if n == "MoEZip" and not visible else {}  # there is no question to go by
    ways = [asked, {"beta": 3}] if method(n).evicts else [asked]
    window = {"name": "snapkv", "window": 8}  # what it goes by while decoding must fit as well
    more = {
        "StreamingLLM": {"scorer": {"reindex": True}, "beta": 2},
        "SnapKV": {"schedule": "every", "beta": 3, "scorer": window},
    }
    return [*ways, more[n]] if n in more else ways


def budgets(n: str, tight: tuple[str, ...]) -> tuple[str, ...]:
    """Tight ones, or one that a method can meet which keeps every token."""
    return ("80%",) if method(n).keeps_all else tight


@pytest.mark.slow
@pytest.mark.parametrize(("visible", "tight"), [(True, ("8%", "40%")), (False, ("15%",))])
def test_fused_equals_single(loaded, artefacts, examples, visible, tight):
    jobs = [
        Job(cell(loaded, artefacts, n, b, dtype=torch.float32, **fields))
        for n in method_names()
        for fields in every_way(n, visible)
        for b in budgets(n, tight)
    ]
    one, other = examples[:2]
    together = Engine(loaded).run(one, jobs, question_visible=visible)
    single = Engine(loaded, fuse=False).run(one, jobs, question_visible=visible)
    limit = 3 * together[0].full_bytes  # of 16 bits: room for a few of these cells in float32
    bounded = Engine(loaded, max_bytes=limit).run(one, jobs, question_visible=visible)
    for a, b, c in zip(together, single, bounded, strict=True):
        assert same(a, b)
        assert same(a, c)
    assert together[0].fused_rows == len(jobs)
    assert single[0].fused_rows == 1
    assert 1 < bounded[0].fused_rows < len(jobs)
    assert bounded[0].peak_bytes < together[0].peak_bytes
    together = Engine(loaded).run(other, jobs, question_visible=visible)
    alone = [Engine(loaded, chunk=100).run(other, [j], question_visible=visible)[0] for j in jobs]
    assert all(same(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize(
    ("routed", "uniform"), [("2d_hetero", "2d_uniform"), ("2d_hetero", "1d"), ("RippleKV", "SnapKV")]
)
@pytest.mark.parametrize("at", ["prompt", "peak"])
def test_equal_layers_are_the_uniform_method_bit_for_bit(loaded, artefacts, examples, routed, uniform, at):
    """MoE-nD section 4: a plan per layer whose layers are alike takes the path of the uniform method to the bit."""
    beta = {"beta": 3} if method(uniform).evicts else {}
    one = cell(loaded, artefacts, uniform, "20%", at=at, **beta)
    for example in examples[:1]:
        cut, new = len(example.ids) - 1, max(example.max_new_tokens, len(example.gold_ids))
        plan = one.plan(cut, new)
        assert len({(x.keep, x.k_bits, x.v_bits) for x in plan.layers}) == 1
        other = dataclasses.replace(cell(loaded, artefacts, routed, "20%", at=at, **beta), given=plan)
        a, b = (Engine(loaded).run(example, [Job(x)], positions=True)[0] for x in (one, other))
        kept = [[p.tolist() for heads in out.positions for p in heads] for out in (a, b)]
        assert a.answer_nll == b.answer_nll and kept[0] == kept[1]
        assert same(*(dataclasses.replace(out, positions=[]) for out in (a, b)))


@pytest.mark.req(1)
@pytest.mark.req(4)
@pytest.mark.req(21)
@pytest.mark.parametrize("name", [*UNIFORM, "ripple_2d_head"])
@pytest.mark.parametrize("budget", ["12%", "30%", 60, "24KiB"])
def test_bytes_predicted_held_and_within_budget(loaded, artefacts, examples, name, budget):
    """Every sample is compressed; held bytes equal the plan's prediction, and `matched` binds where it must."""
    evicts = method(name).evicts
    arch = loaded.arch
    for example, at in zip(examples[:3], ("prompt", "peak" if evicts else "prompt", "prompt"), strict=True):
        bound = cell(loaded, artefacts, name, budget, at=at)
        out = Engine(loaded).run(example, [Job(bound)])[0]
        cut = len(example.ids) - 1
        new = max(example.max_new_tokens, len(example.gold_ids))
        total = bound.budget.to_bytes(arch, cut)
        assert out.compressed
        specs = bound.specs(cut, new)
        predicted = 0
        for s in specs:
            parts = [(p.tokens, p.storage, 1 if s.heads else arch.kv_heads) for p in s.heads or (s,)]
            for n, storage, heads in parts:
                predicted += int(layer_bytes(min(n, cut), storage.whole if n >= cut else storage, heads, arch.head_dim))
        assert out.resident_bytes == predicted <= total
        assert out.entries == [min(s.tokens, cut) for s in specs]
        if at == "peak":
            assert out.resident_bytes_peak <= total
        assert out.resident_bytes <= out.resident_bytes_peak <= bound.plan(cut, new).predicted["peak_bytes"]
        assert out.full_bytes == arch.full_bytes(cut)


def test_quantised_outputs_agree_when_everything_is_kept(loaded, artefacts, examples):
    """8 bits and all tokens: the answers of full (METHODS: such cells are tested for agreement)."""
    m = dataclasses.replace(method("2d_uniform"), precision={"k_bits": 8, "v_bits": 8}, always_quantise=True)
    bound = bind(m, Budget.parse("1e6"), "matched", loaded.arch, t_ref=None, artefacts=artefacts)
    full = cell(loaded, artefacts, "full", 1)
    for example in examples:
        a, b = Engine(loaded).run(example, [Job(bound), Job(full)])
        assert a.compressed
        assert a.token_ids == b.token_ids
        assert abs(a.answer_nll - b.answer_nll) < 0.05


def test_sampling_is_seeded_per_example_and_draw(loaded, artefacts, examples):
    """Draws differ, the same draw repeats whatever decodes beside it, and order does not matter."""
    generation = Generation(max_new_tokens=12, temperature=3.0, top_p=1.0)
    bound = cell(loaded, artefacts, "SnapKV", "30%")
    engine = Engine(loaded)
    draws = engine.run(examples[0], [Job(bound, d) for d in range(4)], generation, seed=7)
    assert len({tuple(o.token_ids) for o in draws}) > 1
    other = engine.run(examples[1], [Job(bound, 2)], generation, seed=7)[0]
    again = engine.run(examples[0], [Job(bound, 2)], generation, seed=7)[0]
    assert again.token_ids == draws[2].token_ids
    assert other.token_ids != again.token_ids
    assert engine.run(examples[0], [Job(bound, 2)], generation, seed=8)[0].token_ids != again.token_ids
    greedy = engine.run(examples[0], [Job(bound)], Generation(temperature=0.0))[0]
    near = engine.run(examples[0], [Job(bound)], Generation(temperature=1.0, top_p=1e-9))[0]
    assert near.token_ids == greedy.token_ids


def test_stable_seed_is_pinned():
    """The same on every machine: a changed number would change every sampled result."""
    assert stable_seed(0, "a", 1) == 5352727647617221297


def test_finish_reasons(loaded, artefacts, examples):
    full = cell(loaded, artefacts, "full", 1)
    short = Engine(loaded).run(examples[0], [Job(full)], Generation(max_new_tokens=1))[0]
    assert (short.finish_reason, short.new_tokens) == ("length", 1)
    done = Engine(loaded).run(examples[0], [Job(full)])[0]
    assert done.finish_reason == "eos"
    word = done.text.split()[1]
    stopped = Engine(loaded).run(dataclasses.replace(examples[0], stop=(word,)), [Job(full)])[0]
    assert stopped.finish_reason == "stop"
    assert word not in stopped.text


@pytest.mark.req(11)
def test_too_long_and_too_short_prompts_are_refused(loaded, artefacts):
    sample = Sample("t", "x", "", "", "", ())
    full = cell(loaded, artefacts, "full", 1)
    with pytest.raises(UserError, match="1024"):
        Engine(loaded).run(Rendered(sample, (5,) * 1020, 1000, 8), [Job(full)])
    with pytest.raises(UserError, match="two tokens"):
        Engine(loaded).run(Rendered(sample, (5,), 1, 8), [Job(full)])


def test_teacher_forced_scores_against_the_plain_model(loaded, artefacts, examples):
    """answer_nll and token_accuracy of full equal a plain forward pass over prompt and gold."""
    for example in examples[:3]:
        out = Engine(loaded).run(example, [Job(cell(loaded, artefacts, "full", 1, dtype=torch.float32))])[0]
        ids = torch.tensor([[*example.ids, *example.gold_ids]])
        with torch.no_grad():
            logits = loaded.model(input_ids=ids).logits[0, len(example.ids) - 1 : -1]
        gold = torch.tensor(example.gold_ids)
        assert out.answer_nll == pytest.approx(float(torch.nn.functional.cross_entropy(logits, gold)), abs=1e-4)
        assert out.token_accuracy == float((logits.argmax(-1) == gold).float().mean())


def test_given_text_is_scored_across_evictions(loaded, artefacts):
    """kind "nll": a cap smaller than the text that follows still holds, and nothing is generated."""
    bench = benchmark({"name": "recall", "type": "recall", "length": 256, "rows": 1})
    base = bench.render(bench.samples()[0], loaded.tokenizer, loaded.arch, chat=False)
    example = dataclasses.replace(base, ids=base.ids[:120], gold_ids=base.ids[120:200], max_new_tokens=0)
    for name in (*FAMILY, "StreamingLLM"):
        bound = cell(loaded, artefacts, name, 40, at="peak")
        out = Engine(loaded).run(example, [Job(bound)])[0]
        assert out.new_tokens == 0 and out.answer_nll is not None
        assert out.resident_bytes_peak <= bound.budget.to_bytes(loaded.arch, 119)


def test_caches_that_do_not_decode_yet_are_not_held(loaded, artefacts, examples, monkeypatch):
    """`max_bytes` bounds memory: cells are forked batch by batch, one ahead, and finished batches are let go."""
    alive, most = weakref.WeakSet(), []
    make, decode = LayerKV.__init__, Decoder.answer

    def made(self, *args, **kwargs):
        make(self, *args, **kwargs)
        alive.add(self)

    def decoded(self, *args, **kwargs):
        gc.collect()
        most.append(len(alive))
        return decode(self, *args, **kwargs)

    monkeypatch.setattr(LayerKV, "__init__", made)
    monkeypatch.setattr(Decoder, "answer", decoded)
    jobs = [Job(cell(loaded, artefacts, "Random", f"{b}%")) for b in (10, 20, 30, 40, 50)]
    Engine(loaded, fuse=False).run(examples[0], jobs)
    assert len(most) == 5
    assert max(most) <= 2 * loaded.arch.layers


@pytest.mark.slow
@pytest.mark.req(1)
@pytest.mark.parametrize(("visible", "protocol"), [(True, "paper"), (False, "matched")])
def test_long_feeds_do_not_depend_on_company(loaded, artefacts, visible, protocol):
    """Text longer than a group is packed and evicted at the same tokens, fused or not: same NLL, bytes and peak."""
    bench = benchmark({"name": "recall", "type": "recall", "length": 256, "rows": 1})
    base = bench.render(bench.samples()[0], loaded.tokenizer, loaded.arch, chat=False)
    example = dataclasses.replace(
        base, ids=base.ids[:120], context_tokens=50, gold_ids=base.ids[120:240], max_new_tokens=0
    )
    bounds = [
        bind(
            method(n),
            Budget.parse(40),
            protocol,
            loaded.arch,
            t_ref=None,
            artefacts=artefacts,
            store_dtype=torch.float32,
        )
        for n in (*FAMILY, "SnapKV", "StreamingLLM", "H2O")
    ]
    fused = Engine(loaded).run(example, [Job(b) for b in bounds], question_visible=visible)
    for bound, out in zip(bounds, fused, strict=True):
        assert same(out, Engine(loaded, chunk=33).run(example, [Job(bound)], question_visible=visible)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "tight"), [("matched", ("6%",)), ("paper", ("20%",))])
def test_embedded_model_fused_equals_single(protocol, tight):
    """Every method on SmolLM2 in fp32, as one batch and one by one: the same tokens and bytes."""
    from tests.moend.methods.made import calibrations

    cache = Path(os.environ.get("MOEND_CACHE", "~/.cache/moend")).expanduser()
    loaded = models.load(models.spec("smollm2_135m", dtype="float32", store_dtype="model"), cache)
    bench = benchmark({"name": "niah", "type": "niah", "length": 600})
    example = bench.render(bench.samples()[0], loaded.tokenizer, loaded.arch, chat=True)
    artefacts = calibrations(loaded.arch)
    jobs = [
        Job(bind(method(n, **fields), Budget.parse(b), protocol, loaded.arch, t_ref=None, artefacts=artefacts,
                 store_dtype=loaded.store_dtype))
        for n in method_names() if n != "MoEZip"  # a dense model has no routers
        for fields in every_way(n, True) for b in budgets(n, tight)
    ]  # fmt: skip
    short = Generation(max_new_tokens=8)  # those that evict while decoding do so at least twice
    together = Engine(loaded).run(example, jobs, short)
    single = Engine(loaded, fuse=False).run(example, jobs, short)
    assert together[0].fused_rows == len(jobs)
    assert len({tuple(o.token_ids) for o in together}) > 1
    for a, b in zip(together, single, strict=True):
        assert same(a, b)


@pytest.mark.slow
@pytest.mark.req(3)
@pytest.mark.parametrize("length", [100, 127, 128, 2000])
def test_embedded_model_with_room_gives_full_s_tokens(length):
    """Every method on SmolLM2 at lengths around a group of 128, 16-bit entries stored as the model computes (fp32)."""
    from tests.moend.methods.made import calibrations

    cache = Path(os.environ.get("MOEND_CACHE", "~/.cache/moend")).expanduser()
    loaded = models.load(models.spec("smollm2_135m", store_dtype="model"), cache)
    generator = torch.Generator().manual_seed(length)
    ids = tuple(torch.randint(100, 40000, (length,), generator=generator).tolist())
    example = Rendered(Sample("t", "x", "", "", "", ()), ids, length // 2, 12)
    artefacts = calibrations(loaded.arch)
    names = method_names()
    jobs = [
        Job(bind(method(n), Budget.parse(b), "matched", loaded.arch, t_ref=None, artefacts=artefacts,
                 store_dtype=loaded.store_dtype))
        for n in names for b in ((length + 12, "1e9") if length == 128 else (length + 12,))
    ]  # fmt: skip
    # an unseen question is fed again for every method: dear at 2,000 tokens, and the same code at 128
    for visible in (True, False) if length in (100, 128) else (True,):
        outs = Engine(loaded).run(example, jobs, question_visible=visible)
        full = outs[names.index("full") * len(jobs) // len(names)]
        assert len(full.token_ids) > 0
        assert all(o.token_ids == full.token_ids for o in outs)
    if length == 128:  # and one by one
        singles = Engine(loaded, fuse=False).run(example, jobs[::2])
        assert all(o.token_ids == singles[names.index("full")].token_ids for o in singles)


def test_attention_scaling_is_read_from_the_model():
    from moend.engine import attention_scaling

    assert attention_scaling(tiny("qwen3")) == [0.25] * 3


def test_positions_are_those_of_the_entries_that_are_held(loaded, artefacts, examples):
    names = ["full", "2d_hetero", "SnapKV", "StreamingLLM", "KVZip"]
    jobs = [Job(cell(loaded, artefacts, n, "25%")) for n in names]
    outs = dict(zip(names, Engine(loaded).run(examples[0], jobs, positions=True), strict=True))
    for out in outs.values():
        assert len(out.positions) == loaded.arch.layers
        for heads, entries in zip(out.positions, out.entries, strict=True):
            assert len(heads) == loaded.arch.kv_heads
            assert abs(sum(map(len, heads)) / len(heads) - entries) < 1
            for p in heads:
                assert torch.equal(p, p.unique()) and p[0] >= 0 and p[-1] < out.compressed_tokens
    tokens = outs["full"].compressed_tokens
    assert all(p.tolist() == list(range(tokens)) for heads in outs["full"].positions for p in heads)
    for heads in outs["StreamingLLM"].positions:
        assert heads[0].tolist() == [0, 1, 2, 3, *range(tokens - len(heads[0]) + 4, tokens)]
    assert len({len(p) for heads in outs["KVZip"].positions for p in heads}) > 1  # heads of unequal length
    assert not Engine(loaded).run(examples[0], jobs[:1])[0].positions


@pytest.mark.parametrize("visible", [False, True])
def test_questions_on_one_context_are_answered_as_if_alone(loaded, artefacts, examples, visible, monkeypatch):
    """One prefill and one compression serve all questions; each is answered bit for bit as on a fork of its own."""
    base = examples[0]
    cut = len(base.ids) - 1 if visible else base.context_tokens
    head = base.ids[:cut]
    tails = [base.ids[cut:]] + [(*base.ids[cut:], *base.ids[40 * i : 40 * i + 3], *base.ids[-4:]) for i in (1, 2)]
    prompts = [
        dataclasses.replace(
            base,
            ids=(*head, *tail),
            max_new_tokens=12 - len(tail) + len(tails[0]),  # all feed the same number of tokens at most
            sample=dataclasses.replace(base.sample, id=f"q{i}", meta={"context_id": "c"}),
        )
        for i, tail in enumerate(tails)
    ]
    jobs = [Job(cell(loaded, artefacts, n, "25%")) for n in ("full", "SnapKV", "Random", "H2O", "2d_hetero", "MiniKV")]
    engine, prefills = Engine(loaded), []
    run = engine._prefill
    monkeypatch.setattr(engine, "_prefill", lambda *args: prefills.append(1) or run(*args))
    together = engine.run_questions(prompts, jobs, question_visible=visible)
    assert len(prefills) == 1
    for prompt, outs in zip(prompts, together, strict=True):
        twin = dataclasses.replace(prompt, context_tokens=cut)  # the same fork, and no other question
        alone = engine.run(twin, jobs, question_visible=False)
        assert all(same(a, b) and a.answer_nll == b.answer_nll for a, b in zip(alone, outs, strict=True))
    other = dataclasses.replace(prompts[1], ids=(*reversed(head), *tails[1]))
    with pytest.raises(UserError, match=f"does not begin with the {cut} tokens"):
        engine.run_questions([prompts[0], other], jobs, question_visible=visible)
