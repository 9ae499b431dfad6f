from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import moend.calibration.kl as kl
from moend.calibration import Calibration, Target, kind, kinds
from moend.calibration.artefact import canonical
from moend.calibration.base import windows
from moend.errors import UserError
from moend.plan import EXTRA_KEEPS, KEEPS, lattice
from tests import ROOT

CONF = ROOT / "conf" / "calibration"


def identity(made: Calibration, name: str, scorer):
    """The settings in the identity of a kind, for a method with this scorer."""
    from moend.scoring import scorer as build

    held = {"n_sink": 4, "recent": 32, "group": 64, "window": None, "channels": 64}
    ranks = None if scorer is None else build(**scorer)
    method = SimpleNamespace(name="M", scorer=scorer, make_scorer=lambda: ranks, settings={"scorer": scorer}, **held)
    method.make_allocator = lambda: SimpleNamespace(divides_heads=False)
    return kind(name).identity(Target(made, method, SimpleNamespace(texts="text", store_dtype="bfloat16", arch=None)))


def read(name: str) -> Calibration:
    with initialize_config_dir(str(CONF), version_base=None):
        return Calibration.from_fields(OmegaConf.to_container(compose(name)))


@pytest.mark.parametrize("name", sorted(p.stem for p in CONF.glob("*.yaml")))
def test_every_file_binds(name):
    made = read(name)
    for name in kinds():
        canonical(identity(made, name, {"name": "trig"}))
    assert kl.named_configs(made.of("kl").configs)


def test_default_examples_fit_the_model_and_what_was_set_stays():
    small = SimpleNamespace(texts="recall", arch={"max_positions": 512})
    fitted = Target(Calibration(), None, small).examples("ripple")
    assert (fitted.prefix, fitted.window, fitted.text) == (384, 128, "recall")
    own = Calibration.from_fields({"ripple": {"prefix": 900, "text": "text"}})
    kept = Target(own, None, small).examples("ripple")
    assert (kept.prefix, kept.text) == (900, "text")  # more than the model has: told when it is measured
    large = SimpleNamespace(texts="text", arch={"max_positions": 8192})
    assert Target(Calibration(), None, large).examples("damage").prefix == 1024


def test_the_files_say_what_the_method_says():
    assert read("default") == Calibration()
    assert Calibration().keeps == (*KEEPS, *EXTRA_KEEPS)
    paper = read("paper")
    assert len(lattice(paper.keeps, paper.bits)) == 54
    long = paper.of("kl")
    assert (paper.eviction, long.sequences, long.tokens, long.positions) == ("random", 8, 2048, None)
    assert read("small").of("kl") == Calibration().of("kl")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"evictoin": "random"}, "unknown calibration field 'evictoin'. Did you mean 'eviction'"),
        ({"kl": {"sequence": 3}}, "unknown calibration.kl field 'sequence'. Did you mean 'sequences'"),
        ({"eviction": "randm"}, "Did you mean 'random'"),
        ({"kl": {"configs": "papre"}}, "Did you mean 'paper'"),
        ({"kl": {"tokens": 1}}, "calibration.kl.tokens must be a whole number >= 2, got 1"),
        ({"kl": {"positions": 600}}, r"calibration.kl.positions \(600\) is more than its tokens \(512\)"),
        ({"kl": 3}, "calibration.kl must hold fields"),
        ({"seeds": []}, "calibration.seeds must be"),
        ({"seeds": [0.5]}, "calibration.seeds must be"),
        ({"seeds": 3}, "calibration.seeds must be a list, got 3"),
        ({"keeps": [0.5, 1.5]}, "calibration.keeps must be"),
        ({"bits": [16, 3]}, "calibration.bits must be"),
        ({"text": "  "}, "calibration.text must be"),
        ({"ripple": {"noise": 0.3}}, "unknown calibration.ripple field 'noise'"),
        ({"ripple": {"relative_noise": 0}}, "calibration.ripple.relative_noise must be a number > 0, got 0"),
        ({"ripple": {"examples": 0}}, "calibration.ripple.examples must be a whole number >= 1, got 0"),
        ({"ripple": {"damage": [1.0]}}, r"calibration.ripple.damage must be shares in \(0, 1\)"),
        ({"ripple": {"damage": 0.2}}, "calibration.ripple.damage must be a list, got 0.2"),
        ({"ripple": {"text": "txt"}}, "Did you mean 'text'"),
        ({"ripple": {"text": "file"}}, "text_file must be given exactly where"),
        ({"ripple": {"text_file": "x"}}, "text_file must be given exactly where"),
        ({"ripple": {"stability": 1}}, "calibration.ripple.stability must be true or false, got 1"),
        ({"ripple": []}, "calibration.ripple must hold fields"),
        ({"damage": {"keep": [1]}}, "unknown calibration.damage field 'keep'. Did you mean 'keeps'"),
        ({"damage": {"examples": 0}}, "calibration.damage.examples must be a whole number >= 1, got 0"),
        ({"damage": {"kinds": ["recal"]}}, "Did you mean 'recall'"),
        ({"damage": {"kinds": ["text", "text"]}}, "calibration.damage.kinds must be different kinds"),
        ({"damage": {"kinds": "text"}}, "calibration.damage.kinds must be a list, got 'text'"),
        ({"damage": {"keeps": [0]}}, r"calibration.damage.keeps must be shares in \(0, 1\]"),
        ({"damage": {"bits": [8, 4]}}, "calibration.damage.bits must be a list"),
        ({"damage": {"bits": [[8, 3]]}}, r"calibration.damage.bits must be \[K, V\] or \[K, V, least share\]"),
        ({"damage": {"bits": [[8, 4, 2]]}}, "calibration.damage.bits must be"),
        ({"damage": {"bits": [[8, 4, 0.5]], "keeps": [0.1]}}, "has no share that any of"),
        ({"damage": {"text": "file"}}, "text_file must be given exactly where"),
        ({"damage": 3}, "calibration.damage must hold fields"),
    ],
)
def test_mistakes_are_one_line(fields, message):
    with pytest.raises(UserError, match=message) as error:
        Calibration.from_fields(fields)
    assert "\n" not in str(error.value)


def test_settings_hold_only_what_the_numbers_depend_on():
    a = Calibration()
    trig = {"name": "trig"}
    assert identity(a, "queries", trig) == {}
    assert "seeds" not in identity(a, "sensitivity", trig)
    assert identity(a, "sensitivity", trig) != identity(a, "sensitivity", {"name": "snapkv"})
    shuffled = Calibration.from_fields({"keeps": list(reversed(a.keeps)), "seeds": [7], "kl": {"tokens": 600}})
    assert identity(shuffled, "sensitivity", trig) == identity(a, "sensitivity", trig)
    assert identity(shuffled, "kl", trig) != identity(a, "kl", trig)
    random = Calibration(eviction="random")
    assert identity(random, "sensitivity", trig) == identity(random, "sensitivity", None)
    assert identity(random, "sensitivity", None)["seeds"] == [0, 1, 2]
    assert canonical(identity(Calibration.from_fields({"keeps": [1, 0.5]}), "sensitivity", trig)) == canonical(
        identity(Calibration.from_fields({"keeps": [1.0, 0.5]}), "sensitivity", trig)
    )
    snap = {"name": "snapkv"}
    assert identity(a, "ripple", snap) == identity(a, "ripple", trig)  # noise knows no scorer
    damage = Calibration.from_fields({"ripple": {"damage": [0.2, 0.1, 0.2]}})
    assert identity(damage, "ripple", snap)["damage"] == [0.1, 0.2]
    assert identity(damage, "ripple", snap) != identity(damage, "ripple", trig)
    assert identity(shuffled, "ripple", snap) == identity(a, "ripple", snap)
    # A method that keeps every token has no scorer to evict with, and no use for the columns that evict.
    assert identity(a, "sensitivity", None) == identity(random, "sensitivity", trig)


def test_damage_settings_hold_only_what_the_numbers_depend_on():
    snap = {"name": "snapkv"}
    a = identity(Calibration(), "damage", snap)

    def of(**fields):
        return identity(Calibration.from_fields({"damage": fields}), "damage", snap)

    assert of(keeps=[1, 0.6, 0.35, 0.2, 0.1, 0.05, 0.025, 0.6], bits=[[4, 4], [8, 4, 0.35]]) == a
    assert identity(Calibration(eviction="random"), "damage", snap) == a  # the method's own scorer, always
    assert of(kinds=["text"], cue=3) == of(kinds=["text"])
    changed = [
        of(bits=[[8, 4], [4, 4]]),
        of(examples=3),
        of(prefix=99),
        of(window=4),
        of(every=1),
        of(cue=3),
        of(keeps=[0.5]),
        of(bits=[[8, 8]]),
    ]
    assert all(x != a for x in [*changed, identity(Calibration(), "damage", {"name": "trig"})])
    with pytest.raises(UserError, match="M has no scorer"):
        identity(Calibration(), "damage", None)


def test_settings_reach_the_table():
    made = Calibration(keeps=(0.5, 1.0), bits=(16, 4))
    ids = windows(range(2100), made.of("kl").sequences, made.of("kl").tokens)
    assert ids.shape == (4, 512)
    assert ids.dtype == torch.int64
