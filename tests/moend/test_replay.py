"""Replays against full attention matrices of a stock forward pass, and that they leave the prefill alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from moend.budget import Arch, Budget
from moend.cache import prefill
from moend.errors import UserError
from moend.hf.attention import attention_of
from moend.hf.routers import Routing
from moend.methods.bind import bind
from moend.methods.spec import method
from moend.replay import CARRY, SINKS, Replay, Request, request, routing_flips
from moend.scoring.moezip import fisher_trace
from tests.tiny import tiny

START, STOP, LENGTH = 2, 61, 70
ASK = Request(first=(80, 81, 82), later=(83, 84))
SEEN: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
GONE: dict[int, torch.Tensor] = {}  # (H, LENGTH) of a layer: what queries behind LENGTH do not see


def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **rest: Any) -> Any:
    """Eager attention that remembers its queries and keys."""
    group, t = query.shape[1] // key.shape[1], query.shape[2]
    SEEN[module.layer_idx] = (query[0], key[0].repeat_interleave(group, 0))
    hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
    if rest.get("sliding_window"):
        hidden |= torch.ones(t, t, dtype=torch.bool).tril(-rest["sliding_window"])
    hidden = hidden.repeat(query.shape[1], 1, 1)
    if module.layer_idx in GONE:
        hidden[:, LENGTH:, :LENGTH] |= GONE[module.layer_idx].repeat_interleave(group, 0)[:, None]
    share = ((query @ key.repeat_interleave(group, 1).mT) * scaling).masked_fill(hidden, -torch.inf).softmax(-1)
    return (share @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register("spy", spy)


def ids() -> list[int]:
    return torch.randint(3, 79, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()


def full(model: Any, tokens: list[int]) -> tuple[dict[int, Any], list[torch.Tensor]]:
    """Queries and keys of every layer in one plain pass, and the router's logits."""
    SEEN.clear()
    model.set_attn_implementation("spy")
    moe = "Moe" in type(model).__name__
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor([tokens]), use_cache=False, **({"output_router_logits": True} if moe else {})
        )
    model.set_attn_implementation("sdpa")
    return dict(SEEN), list(out.router_logits) if moe else []


def naive_scores(model: Any, tokens: list[int], chunk: int) -> list[torch.Tensor]:
    """KVZip from whole passes over context + request + chunk, with the softmax written out."""
    scale = model.config.head_dim**-0.5
    heads = model.config.num_key_value_heads
    best = [torch.full((heads, LENGTH), 3.0) for _ in range(model.config.num_hidden_layers)]
    for first in range(START, STOP, chunk):
        last = min(first + chunk, STOP)
        ask = list(ASK.first) if first == START else [*ASK.later, *tokens[max(first - CARRY, START) : first]]
        seen, _ = full(model, tokens[:STOP] + ask + tokens[first:last])
        scored = list(range(max(first, SINKS), last))
        for layer, (q, k) in seen.items():
            for head in range(heads):
                top = torch.zeros(len(scored))
                for g in (2 * head, 2 * head + 1):
                    for me in range(STOP, q.shape[1]):
                        columns = [*range(SINKS), *scored, *range(STOP, me + 1)]
                        share = torch.stack([q[g, me] @ k[g, c] * scale for c in columns]).softmax(0)
                        top = torch.maximum(top, share[SINKS : SINKS + len(scored)])
                best[layer][head, scored] = top
    after = LENGTH - STOP
    for b in best:
        b[:, STOP:] = 1 + (1 + torch.arange(after)) / after
    return best


def replay(model: Any, positions: int = 4096, **rest: Any) -> Replay:
    made = Replay(model, None, positions, **rest)
    made.request = ASK
    return made


@pytest.mark.req(5)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(("chunk", "piece"), [(2048, 1024), (25, 7)])
def test_reconstruction_is_the_naive_maximum(name, chunk, piece):
    model, tokens = tiny(name), ids()
    done = prefill(model, torch.tensor([tokens]))
    found = replay(model, chunk=chunk, piece=piece).observe(done, {"reconstruction"}, tokens, (START, STOP))
    for mine, naive in zip(found.observed["reconstruction"], naive_scores(model, tokens, chunk), strict=True):
        torch.testing.assert_close(mine[0], naive, atol=2e-5, rtol=1e-4)


def routing_naive(model: Any, tokens: list[int], context: int, instruction: list[int]) -> tuple[torch.Tensor, float]:
    seen, logits = full(model, tokens[:context] + instruction)
    r, above, count = torch.zeros(context), 0, 0
    for layer, (q, k) in seen.items():
        t = q.shape[1]
        matrix = ((q @ k.mT) * model.config.head_dim**-0.5).masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)
        matrix = matrix.softmax(-1)
        for me in range(context, t):
            g = logits[layer].view(t, -1)[me].softmax(-1)
            f = float((torch.diag(g) - torch.outer(g, g)).trace())
            r += matrix[:, me, :context].amax(0) * f
            above, count = above + (f > 0.85 * (1 - 1 / len(g))), count + 1
    return r, above / count


@pytest.mark.req(5)
@pytest.mark.parametrize("mode", ["query", "recon"])
@pytest.mark.parametrize("piece", [1024, 4])
def test_routing_is_the_naive_sum(mode, piece):
    model, tokens = tiny("qwen3_moe", initializer_range=0.2 if mode == "query" else 0.1), ids()
    done = prefill(model, torch.tensor([tokens]))
    name = f"routing_{mode}"
    found = replay(model, piece=piece).observe(done, {name}, tokens, (START, STOP)).observed[name]
    r, gamma = routing_naive(model, tokens, STOP, tokens[STOP:] if mode == "query" else list(ASK.first))
    assert len(found) == 3
    torch.testing.assert_close(found[0][0, 0, START:STOP], r[START:], atol=1e-4, rtol=1e-4)
    assert START > 0 and bool((found[0][0, 0, :START] == -torch.inf).all())  # BOS and template take no anchor's place
    assert bool((found[0][0, 0, STOP:] == -torch.inf).all())
    assert found[0][0, 1].tolist() == pytest.approx([gamma] * LENGTH)
    assert 0 < gamma < 1


def test_together_is_as_apart_and_the_prefill_stays():
    model, tokens = tiny("qwen3_moe"), ids()
    done = prefill(model, torch.tensor([tokens]))
    before = [(x.keys.clone(), x.values.clone()) for x in done.layers]
    run = replay(model, chunk=25)
    names = {"reconstruction", "routing_recon", "routing_query"}
    together = run.observe(done, names, tokens, (START, STOP)).observed
    for name in names:
        for a, b in zip(together[name], run.observe(done, {name}, tokens, (START, STOP)).observed[name], strict=True):
            torch.testing.assert_close(a, b)
    for layer, (k, v) in zip(done.layers, before, strict=True):
        assert torch.equal(layer.keys, k)
        assert torch.equal(layer.values, v)
    assert done.observed == {}


def test_the_question_does_not_change_what_reconstruction_sees():
    model, tokens = tiny("qwen3_moe"), ids()
    run = replay(model)
    seen = run.observe(prefill(model, torch.tensor([tokens])), {"reconstruction"}, tokens, (START, STOP))
    short = tokens[:STOP]
    unseen = run.observe(prefill(model, torch.tensor([short])), {"reconstruction"}, short, (START, STOP))
    for a, b in zip(seen.observed["reconstruction"], unseen.observed["reconstruction"], strict=True):
        torch.testing.assert_close(a[..., :STOP], b)
        assert float(a[..., SINKS:STOP].max()) < 1 < float(a[..., STOP:].min())
        assert bool((a[..., STOP:].diff() > 0).all())  # the newest of the question is the last to go


def test_memory_grows_with_the_context_not_with_its_square():
    """The largest tensor of a pass over twice the context is at most about twice as large."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                if isinstance(t, torch.Tensor):
                    self.size = max(self.size, t.untyped_storage().nbytes())
            return out

    model = tiny("qwen3_moe", layers=1)
    sizes = []
    for n in (1024, 2048):
        tokens = torch.randint(3, 79, (n,)).tolist()
        done = prefill(model, torch.tensor([tokens]))
        run = replay(model, chunk=256, piece=128)
        with Largest() as largest:
            run.observe(done, {"reconstruction", "routing_recon"}, tokens, (0, n))
        sizes.append(largest.size)
    assert sizes[1] <= 2.1 * sizes[0]


def test_an_empty_question_and_a_dense_model_are_refused():
    model, tokens = tiny("qwen3_moe"), ids()
    done = prefill(model, torch.tensor([tokens]))
    run = replay(model)
    with pytest.raises(UserError, match="the question after the context, and there is none"):
        run.observe(done, {"routing_query"}, tokens, (START, LENGTH))
    dense = tiny("llama")
    with pytest.raises(UserError, match="LlamaForCausalLM has no router that transformers can record"):
        replay(dense).observe(prefill(dense, torch.tensor([tokens])), {"routing_query"}, tokens, (START, STOP))


def test_a_model_without_room_for_the_repetition_is_refused_and_a_little_room_is_used():
    model, tokens = tiny("llama"), ids()
    done = prefill(model, torch.tensor([tokens]))
    small = replay(model, STOP + 10 + 20)  # later requests have 2 + 8 tokens: chunks of 20 fit
    found = small.observe(done, {"reconstruction"}, tokens, (START, STOP)).observed["reconstruction"]
    assert small.shortened == 20  # and says that it was not KVZip's own 2,048
    for mine, naive in zip(found, naive_scores(model, tokens, 20), strict=True):
        torch.testing.assert_close(mine[0], naive, atol=2e-5, rtol=1e-4)
    with pytest.raises(UserError, match="leaves no room for its repetition"):
        replay(model, STOP + 10).observe(done, {"reconstruction"}, tokens, (START, STOP))


def test_request_in_a_models_words():
    class Words:
        unk_token_id = 0

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [{"?": 1, "all": 2}.get(w, 0) for w in text.split()]}

    assert request(Words(), "? all") == Request((1, 2), (1, 2))
    with pytest.raises(UserError, match="does not know the words of 'Repeat the previous context exactly"):
        request(Words())


def test_gates_are_those_of_the_instruction_alone():
    """Uniform routers: f is 1 - 1/E for each token, so r is that times the attention summed over layers."""
    model, tokens = tiny("qwen3_moe"), ids()
    run = replay(model)
    for router in run.routing(tokens).modules.values():
        torch.nn.init.zeros_(router.weight)
    done = prefill(model, torch.tensor([tokens]))
    found = run.observe(done, {"routing_query"}, tokens, (START, STOP))
    seen, _ = full(model, tokens)
    total = torch.zeros(STOP)
    for q, k in seen.values():
        t = q.shape[1]
        matrix = (q @ k.mT * 0.25).masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf).softmax(-1)
        total += matrix[:, STOP:, :STOP].amax(0).sum(0)
    f = float(fisher_trace(torch.full((4,), 0.25), "softmax"))
    torch.testing.assert_close(
        found.observed["routing_query"][0][0, 0, START:STOP], (total * f)[START:], atol=1e-4, rtol=1e-4
    )
    assert float(found.observed["routing_query"][0][0, 1, 0]) == 1.0


@pytest.mark.req(5)
def test_routing_flips_are_those_of_a_full_pass_with_the_dropped_entries_masked(monkeypatch):
    model, tokens = tiny("qwen3_moe"), ids()
    answer = torch.randint(3, 79, (12,), generator=torch.Generator().manual_seed(6)).tolist()
    done = prefill(model, torch.tensor([tokens]), last_queries=8)
    snap = method("SnapKV", scorer={"name": "snapkv", "window": 8}, recent=8)
    bound = bind(snap, Budget.parse("25%"), "matched", Arch(3, 4, 2, 16, 4096), t_ref=None, store_dtype=torch.float32)
    cache = bound.fork(done, len(answer), rotary=None, scaling=[0.25] * 3)
    found = routing_flips(model, Routing.of(model, torch.tensor([tokens[:30]])), done, cache, answer)

    def chosen() -> list[list[set[int]]]:
        _, logits = full(model, tokens + answer)
        return [[set(t.topk(2).indices.tolist()) for t in layer.view(-1, 4)[LENGTH:]] for layer in logits]

    whole = chosen()
    for layer, (row,) in enumerate(cache.parts()):
        assert row.positions is not None
        dropped = torch.ones(2, LENGTH, dtype=torch.bool).scatter(1, row.positions.long(), False)
        assert 0 < int(dropped.sum()) < 2 * LENGTH
        monkeypatch.setitem(GONE, layer, dropped)
    pairs = [(a, b) for x, y in zip(whole, chosen(), strict=True) for a, b in zip(x, y, strict=True)]
    naive = sum(a != b for a, b in pairs) / len(pairs)
    assert found == pytest.approx(naive)
    assert 0 < naive < 1
    assert any(a != b and a & b for a, b in pairs)  # one expert of two is enough


def test_the_models_own_attention_is_back_afterwards():
    model, tokens = tiny("llama"), ids()
    replay(model).observe(prefill(model, torch.tensor([tokens])), {"reconstruction"}, tokens, (START, STOP))
    assert model.config._attn_implementation == "sdpa"
    with attention_of(model):
        assert model.config._attn_implementation == "moend"
