"""Models: specs, identities, sources, cold caches, checksums. Nothing here needs a network."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import moend
from moend.budget import Arch
from moend.errors import UserError
from moend.models import load as models
from tests.moend.models.conftest import local, words_tokenizer
from tests.tiny import tiny

TINY = {"layers": 3, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "max_positions": 4096}
PAPERS = {
    "deepseek_r1_distill_qwen_7b": Arch(28, 28, 4, 128, 131072),
    "qwen2.5_7b_instruct": Arch(28, 28, 4, 128, 32768),
    "llama3.1_8b_instruct": Arch(32, 32, 8, 128, 131072),
    "mistral_7b_v0.3": Arch(32, 32, 8, 128, 32768),
    "qwen3_8b": Arch(36, 32, 8, 128, 40960),
    "qwen3_30b_a3b": Arch(48, 32, 4, 128, 40960),
}


# Specs


def test_every_packaged_model_is_a_spec() -> None:
    names = [p.stem for p in models.conf_dir().glob("*.yaml")]
    assert {"smollm2_135m", "recall_moe", "recall_moe_v2", "hf", *PAPERS} == set(names)
    for name in set(names) - {"hf"}:
        spec = models.spec(name)
        assert spec.name == name and spec.calibration_text and spec.pinned_arch is not None


def test_pinned_architectures_are_those_published() -> None:
    assert {name: models.spec(name).pinned_arch for name in PAPERS} == PAPERS


def test_hub_models_have_a_commit_and_an_identity_without_network(tmp_path: Path) -> None:
    for name in PAPERS:
        spec = models.spec(name)
        assert models.identity(spec, tmp_path) == {"id": spec.id, "revision": spec.revision}
        assert len(spec.revision or "") == 40
        assert models.read_arch(spec, tmp_path) == PAPERS[name]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.spec("smolm2_135m"), "unknown model 'smolm2_135m'. Did you mean 'smollm2_135m'?"),
        (lambda: models.spec("hf"), "model=hf needs model.id="),
        (lambda: models.spec("hf", id=" "), "model=hf needs model.id="),
        (lambda: models.spec("hf", id="a b"), "neither a folder that exists nor a hub name"),
        (lambda: models.spec("recall_moe", dtype="bf16"), "unknown model.dtype 'bf16'. Did you mean 'bfloat16'?"),
        (lambda: models.spec("recall_moe", store_dtype="hlf"), "Did you mean 'half'?"),
        (lambda: models.spec("recall_moe", dtyp="auto"), "unknown model field 'dtyp'. Did you mean 'dtype'?"),
        (lambda: models.spec("recall_moe", arch={"layers": 4}), "model.arch needs exactly"),
    ],
)
def test_user_mistakes_are_one_clear_line(call: Any, message: str) -> None:
    with pytest.raises(UserError) as e:
        call()
    assert message in str(e.value) and "\n" not in str(e.value)


def test_the_source_follows_the_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.spec("hf", id="Qwen/Qwen3-8B").source == "hub"
    assert models.spec("hf", id="./missing").source == "local"
    assert local(folder).label == "tiny-llama"
    monkeypatch.chdir(folder.parent)
    spec = models.spec("hf", id="tiny-llama")
    assert spec.source == "local" and spec.id == str(folder)  # true from any working folder afterwards


# Local folders and the fixture


def test_a_local_folder_loads_as_configured(folder: Path, tmp_path: Path) -> None:
    loaded = models.load(local(folder), tmp_path / "cache")
    assert loaded.arch == Arch(**TINY) == models.read_arch(local(folder), tmp_path / "cache")
    assert loaded.model.dtype == torch.float32 and loaded.store_dtype == torch.bfloat16
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer.pad_token_id is not None
    assert models.calibration_ids(loaded) == [4, 5, 6]
    half = models.load(local(folder, dtype="float16", store_dtype="model"), tmp_path / "cache")
    assert half.model.dtype == torch.float16 == half.store_dtype


@pytest.mark.parametrize("device_map", ["auto", "cpu"])
def test_a_device_map_gives_the_same_model_and_answers(device_map: str, folder: Path, tmp_path: Path) -> None:
    one = models.load(local(folder), tmp_path / "cache")
    spread = models.load(local(folder, device_map=device_map), tmp_path / "cache")
    if not torch.cuda.is_available():
        assert spread.model.dtype == one.model.dtype == torch.float32
        assert spread.device == torch.device("cpu")
    ids = torch.tensor([[1, *range(3, 40)]], device=spread.device)
    with moend.compress(spread.model, "SnapKV", "50%"):
        ours = spread.model.generate(ids, max_new_tokens=8, do_sample=False)
    with moend.compress(one.model, "SnapKV", "50%"):
        theirs = one.model.generate(ids.to(one.device), max_new_tokens=8, do_sample=False)
    assert ours.tolist() == theirs.tolist()


def test_float32_checkpoints_are_stored_as_bfloat16(tmp_path: Path) -> None:
    tiny("qwen3").save_pretrained(tmp_path / "m")
    words_tokenizer().save_pretrained(tmp_path / "m")
    assert models.load(local(tmp_path / "m"), tmp_path / "cache").store_dtype == torch.bfloat16
    exact = models.load(local(tmp_path / "m", store_dtype="model"), tmp_path / "cache")
    assert exact.store_dtype == torch.float32


def test_arch_is_read_and_never_assumed() -> None:
    config = tiny("llama").config
    config.num_key_value_heads = None
    assert models.arch_of(config).kv_heads == 4
    config.kv_lora_rank = 8
    with pytest.raises(UserError, match="multi-head latent attention"):
        models.arch_of(config)


def test_a_different_architecture_is_refused_field_by_field(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"kv_heads: has 2, needs 8; max_positions: has 4096, needs 8192"):
        models.load(local(folder, arch=TINY | {"kv_heads": 8, "max_positions": 8192}), tmp_path / "cache")


def test_identity_of_a_folder_is_its_files_not_its_place(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = models.identity(local(folder), cache)
    assert first == models.identity(local(folder), cache) and len(first["weights_sha256"]) == 64
    moved = tmp_path / "elsewhere" / "tiny-llama"
    moved.parent.mkdir()
    folder.rename(moved)
    assert models.identity(local(moved), cache) == first
    assert models.load(local(moved), cache).weights == first["weights_sha256"][:16]
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_theta": 5e5}}))
    assert models.identity(local(moved), cache) != first
    second = models.identity(local(moved), cache)
    (moved / "generation_config.json").write_text('{"eos_token_id": 7}')  # another end of answers, other answers
    assert models.identity(local(moved), cache) != second


def test_a_folder_without_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(UserError, match=r"tiny-llama.*(has no tokenizer|cannot be loaded)"):
        models.load(local(folder), tmp_path / "cache")


def test_hashes_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    path, cache = tmp_path / "w", tmp_path / "cache"
    path.write_bytes(b"one")
    stat = path.stat()
    assert models.file_hash(path, cache) == hashlib.sha256(b"one").hexdigest()
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert models.file_hash(path, cache) == hashlib.sha256(b"one").hexdigest()  # same size and time: not read again
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert models.file_hash(path, cache) == hashlib.sha256(b"two").hexdigest()


def test_broken_folders_say_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(UserError, match="is not a folder"):
        models.available(local(tmp_path / "nowhere", source="local"), cache)
    with pytest.raises(UserError, match=r"no \.gguf file in"):
        models.load(local(folder, gguf_file="a.gguf"), cache)
    (folder / "tiny-Q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"Did you mean 'tiny-Q4.gguf'"):
        models.load(local(folder, gguf_file="tiny-Q5.gguf"), cache)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be loaded"):
        models.load(local(folder), cache)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickled weights"):
        models.load(local(folder), cache)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"name one with model.gguf_file="):
        models.load(local(folder), cache)


def test_missing_shards_are_counted(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match="1 of 2 weight files are missing"):
        models.load(local(folder), tmp_path)


def test_code_of_a_model_is_not_run_unasked(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('code was run')")
    with pytest.raises(UserError, match=r"model.trust_remote_code=true"):
        models.load(local(folder), tmp_path)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_devices_are_checked_before_loading(device: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"model.device '{device}'"):
        models.load(models.spec("recall_moe", device=device), tmp_path)


def test_the_fixture_loads_and_reads_its_calibration_text(tmp_path: Path) -> None:
    spec = models.spec("recall_moe", device="cpu")
    assert models.available(spec, tmp_path) is None
    loaded = models.load(spec, tmp_path)
    ids = models.calibration_ids(loaded)
    assert 100 < len(ids) < 200 and ids[0] == loaded.tokenizer.bos_token_id
    assert loaded.tokenizer.unk_token_id not in ids
    assert models.identity(spec, tmp_path)["weights_sha256"].startswith(loaded.weights)
    # It answers the questions of its own calibration text: the text is in its language.
    logits = loaded.model(torch.tensor([ids])).logits[0]
    text = spec.calibration_text.split()
    end = text.index("<eos>") + 1  # ids carry a <bos> in front
    assert logits[end - 3 : end].argmax(-1).tolist() == ids[end - 2 : end + 1]


# The embedded model


@pytest.mark.slow
def test_the_embedded_model() -> None:
    cache = Path(os.environ.get("MOEND_CACHE", "~/.cache/moend")).expanduser()
    spec = models.spec("smollm2_135m", device="cpu")
    loaded = models.load(spec, cache)
    assert loaded.arch == spec.pinned_arch and loaded.store_dtype == torch.bfloat16
    assert loaded.tokenizer.encode("1234567") == [33, 34, 35, 36, 37, 38, 39]
    ids = models.calibration_ids(loaded)
    assert len(ids) == 55 and ids[0] == loaded.tokenizer.bos_token_id
    paper = yaml.safe_load(Path("conf/calibration/paper.yaml").read_text())  # MoE-nD: "a single 27-token prompt"
    assert paper["template"] == "none" and len(models.calibration_ids(loaded, paper["text"], chat=False)) == 27
    assert len(models.calibration_ids(loaded, chat=False)) == 25  # the same as LaTeX
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    prompt = loaded.tokenizer(text, add_special_tokens=False, return_tensors="pt")
    out = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(out[0, prompt.input_ids.shape[1] :])
