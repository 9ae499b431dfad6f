"""Exports: what the other tool makes of the file is what the plan says, and what it cannot hold is refused."""

from __future__ import annotations

import cmath
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from moend.calibration.artefact import Artefact
from moend.calibration.queries import TrigStatistics, rotation
from moend.errors import UserError
from moend.interop import export
from moend.plan import LayerPlan, RoutingPlan
from tests.moend.calibration.test_queries import hooked
from tests.tiny import tiny

KEPT = st.tuples(st.integers(1, 5000), st.lists(st.integers(1, 6000), min_size=1, max_size=40))
WIDTHS = st.lists(st.sampled_from([16, 8, 4]), min_size=1, max_size=60)


def plan(*layers: LayerPlan, t_ref: int = 100) -> RoutingPlan:
    return RoutingPlan("m", "r", t_ref, "10%", "matched", "none", None, None, layers)


def kvpress_keeps(length: int, ratio: float) -> int:
    """How many of `length` tokens kvpress 0.5.5 keeps at a ratio, by its compute_n_kept."""
    return 0 if ratio >= 1 else max(1, int(length * (1 - ratio)))


def test_kvpress_by_hand() -> None:
    text = export.kvpress_json(plan(LayerPlan(0.25, 25), LayerPlan(1.0, 100), LayerPlan(0.5, None)))
    assert export.read_kvpress(text) == (0.75, 0.0, 0.5)
    assert json.loads(text)["tokens"] == 100 and json.loads(text)["left_out"] == []
    assert export.read_kvpress(export.kvpress_json(plan(LayerPlan(0.25, 25)), tokens=50)) == (0.5,)


@given(KEPT)
def test_kvpress_keeps_the_plans_tokens(drawn: tuple[int, list[int]]) -> None:
    """In floating point too, at any length; a cap above the prompt keeps it whole."""
    length, caps = drawn
    layers = [LayerPlan(min(cap / 6000, 1), cap) for cap in caps]
    ratios = export.read_kvpress(export.kvpress_json(plan(*layers, t_ref=6000), tokens=length))
    assert [kvpress_keeps(length, r) for r in ratios] == [min(cap, length) for cap in caps]


@given(WIDTHS)
def test_type_maps_come_back(widths: list[int]) -> None:
    made = plan(*(LayerPlan(1.0, None, w, w) for w in widths))
    for engine in ("trtllm", "sglang"):
        assert export.read_type_map(export.type_map(made, engine), len(widths), engine) == tuple(widths)


def test_type_maps_by_hand() -> None:
    made = plan(*[LayerPlan(1.0, None, 8, 8)] * 4, *[LayerPlan(1.0, None, 4, 4)] * 32)
    assert export.export_plan(made, "trtllm") == "0-3:fp8,4-35:nvfp4"
    assert export.export_plan(made, "sglang") == "0-3:fp8_e4m3,4-35:fp4_e2m1"
    some = plan(LayerPlan(1.0, None), LayerPlan(1.0, None, 8, 8), LayerPlan(1.0, None))
    assert export.export_plan(some, "trtllm") == "1:fp8"
    assert export.export_plan(some, "sglang") == "0:bf16,1:fp8_e4m3,2:bf16"
    assert export.export_plan(some, "vllm") == "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 2"
    assert export.export_plan(plan(LayerPlan(1.0, None)), "trtllm") == "auto"


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.sampled_from([8, 4]))
def test_vllm_flags_come_back(narrow: list[bool], width: int) -> None:
    widths = [width if x else 16 for x in narrow]
    made = plan(*(LayerPlan(1.0, None, w, w) for w in widths))
    assert export.read_vllm_flags(export.vllm_flags(made), len(widths)) == tuple(widths)


HEADS = LayerPlan(0.3, 30, heads=(LayerPlan(0.2, 20), LayerPlan(0.4, 40)))


@pytest.mark.parametrize(
    ("layers", "form", "lossy", "said"),
    [
        ((LayerPlan(0.5, 50, 8, 8), LayerPlan(0.5, 50)), "kvpress", True, "layers 0 have fewer than 16 bits"),
        ((HEADS, HEADS), "kvpress", True, "KV heads of layers 0-1 differ"),
        ((LayerPlan(1.0, None, 8, 4),), "trtllm", True, "K and V of layers 0 differ in bits"),
        ((LayerPlan(0.5, None, 8, 8),), "sglang", True, "layers 0 keep a part of their tokens"),
        ((LayerPlan(1.0, None, 2, 2),), "trtllm", False, "trtllm has no cache of 2 bits: it has 8, 4, and 16"),
        ((LayerPlan(1.0, None, 8, 8), LayerPlan(1.0, None, 4, 4)), "vllm", False, "has 4 and 8 bits"),
        ((LayerPlan(1.0, None),), "kvpres", False, "Did you mean 'kvpress'?"),
    ],
)
def test_what_a_form_cannot_hold(layers: tuple[LayerPlan, ...], form: str, lossy: bool, said: str) -> None:
    with pytest.raises(UserError, match=None) as e:
        export.export_plan(plan(*layers), form)
    assert said in str(e.value) and ("lossy=true" in str(e.value)) == lossy
    if lossy:
        text = export.export_plan(plan(*layers), form, lossy=True)
        assert form != "kvpress" or json.loads(text)["left_out"]


def test_lossy_takes_means_and_the_wider() -> None:
    assert export.read_kvpress(export.export_plan(plan(HEADS), "kvpress", lossy=True)) == (0.7,)
    assert export.export_plan(plan(LayerPlan(0.5, None, 8, 4)), "trtllm", lossy=True) == "0:fp8"
    with pytest.raises(UserError, match="tokens=7 is for to=kvpress"):
        export.export_plan(plan(HEADS), "vllm", tokens=7)
    with pytest.raises(UserError, match="got 0"):
        export.kvpress_json(plan(HEADS), 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0-9:fp8", "layers that are not among 0 to 3"),
        ("3-1:fp8", "layers that are not among"),
        ("0:fp8,0-1:nvfp4", "layer 0 is named twice"),
        ("0:fp9", "Did you mean 'fp8'?"),
        ("fp8", "no part of a type map"),
    ],
)
def test_odd_maps_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError) as e:
        export.read_type_map(text, 4, "trtllm")
    assert said in str(e.value)
    for odd in ("--kv-cache-dtype fp9", "fp8"):
        with pytest.raises(UserError, match="is not --kv-cache-dtype"):
            export.read_vllm_flags(odd, 4)
    for odd in ("[]", "{", '{"compression_ratios": ["a"]}'):
        with pytest.raises(UserError, match="needs a list of numbers"):
            export.read_kvpress(odd)
    with pytest.raises(UserError, match=r"got 1\.0"):
        export.read_kvpress('{"compression_ratios": [1]}')


def queries(model: Any, **info: Any) -> Artefact:
    """The query statistics of a tiny model."""
    ids = torch.randint(3, 97, (1, 23), generator=torch.Generator().manual_seed(1))
    shape = {"layers": 3, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "max_positions": 4096}
    tensors = TrigStatistics.measure(model, ids).tensors()
    return Artefact("queries", {"model": "tiny", "arch": shape}, tensors, {"rotation": rotation(model)} | info)


def expected_logit(payload: dict[str, Any], layer: int, head: int, key: list[float], gap: int) -> float:
    """What an engine computes from the file: the mean of q . k for a key before RoPE, `gap` positions behind the query.

    The first sum of TriAttention's score, over pairs (i, i + d/2) with the file's own frequencies.
    """
    entry, half = payload["stats"][f"layer{layer:02d}_head{head:02d}"], payload["metadata"]["head_dim"] // 2
    total = 0.0
    for f in range(half):
        q = complex(float(entry["q_mean_real"][f]), float(entry["q_mean_imag"][f]))
        angle = gap * float(payload["metadata"]["inv_freq"][f])
        total += (q * complex(key[f], key[f + half]).conjugate() * cmath.exp(1j * angle)).real
    return total


def test_an_engine_reads_the_mean_logit_of_the_real_queries() -> None:
    """Against the model's own queries, each turned by its distance with plain sines and cosines."""
    model = tiny("llama")
    payload = export.triattention(queries(model))
    ids = torch.randint(3, 97, (1, 23), generator=torch.Generator().manual_seed(1))
    real = hooked(model, ids)[1][2].double()  # layer 1, head 2: (T, 16)
    key = torch.randn(16, generator=torch.Generator().manual_seed(2)).tolist()
    for gap in (0, 1, 7, 100):
        total = 0.0
        for q, f in itertools.product(real.tolist(), range(8)):
            angle = gap * 10000 ** (-f / 8)
            turned = (
                q[f] * math.cos(angle) - q[f + 8] * math.sin(angle),
                q[f] * math.sin(angle) + q[f + 8] * math.cos(angle),
            )
            total += turned[0] * key[f] + turned[1] * key[f + 8]
        assert expected_logit(payload, 1, 2, key, gap) == pytest.approx(total / len(real), rel=1e-4, abs=1e-5)


def test_statistics_come_back_bit_for_bit(tmp_path: Path) -> None:
    artefact = queries(tiny("qwen3"))
    path = tmp_path / "stats.pt"
    with pytest.raises(UserError, match="on request only: add pickle=true"):
        export.save_triattention(artefact, path)
    assert not path.exists()
    export.save_triattention(artefact, path, pickle=True)
    back = export.read_triattention(path).tensors()
    assert all(torch.equal(back[name], artefact.tensors[name]) for name in export.STATISTICS)
    metadata = torch.load(path, weights_only=True)["metadata"]
    assert metadata["sampled_heads"] == [[i, h] for i in range(3) for h in range(4)]
    assert metadata["rope_style"] == "half" and metadata["head_dim"] == 16 and metadata["model_name"] == "tiny"


class Bomb:
    """Writes a file when a pickle that holds it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_file_that_would_run_something_is_not_read(tmp_path: Path) -> None:
    torch.save({"stats": Bomb(tmp_path / "ran")}, tmp_path / "bad.pt")
    with pytest.raises(UserError, match="more than plain tensors"):
        export.read_triattention(tmp_path / "bad.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({}, "has no `stats`"),
        ({"stats": {"layer0": {}}}, "'layer0' is not layerLL_headHH"),
        ({"stats": {"layer00_head01": dict.fromkeys(export.NAMES, torch.ones(4))}}, "has 1 of 2 heads"),
    ],
)
def test_odd_statistics_are_refused(payload: dict[str, Any], said: str, tmp_path: Path) -> None:
    torch.save(payload, tmp_path / "a.pt")
    with pytest.raises(UserError) as e:
        export.read_triattention(tmp_path / "a.pt")
    assert said in str(e.value)


def test_rotations_that_the_layout_cannot_say() -> None:
    model = tiny("llama")
    turn = rotation(model)
    assert turn is not None and turn["dim"] == 16 and turn["scaling"] == 1
    assert turn["inv_freq"] == pytest.approx([10000 ** (-f / 8) for f in range(8)])
    for said, info in (
        ("rotate differently", None),
        ("rotates 8 of 16 dimensions", turn | {"dim": 8}),
        ("by 1.2:", turn | {"scaling": 1.2}),
    ):
        with pytest.raises(UserError, match=said):
            export.triattention(queries(model, rotation=info))
    old = queries(model)
    del old.info["rotation"]
    with pytest.raises(UserError, match="measure it again"):
        export.triattention(old)
    with pytest.raises(UserError, match="this one is 'damage'"):
        export.triattention(Artefact("damage", {}, {}))


def test_gemmas_layers_rotate_differently() -> None:
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )  # fmt: skip
    assert rotation(Gemma3ForCausalLM(config).eval()) is None
