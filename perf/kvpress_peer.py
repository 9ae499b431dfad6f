"""The other side of `perf.against_kvpress`: runs in the peer's environment and answers requests, one JSON line each.

It knows nothing of moend. Token ids come in safetensors files, masks of what is kept go out in them; everything else
is JSON. Requests arrive on standard input, answers leave on what was standard output when the program started (what
libraries print goes to standard error). A request that fails is answered with {"error": ...} and the program goes on.

What is asked of kvpress goes through its own pipeline object; nothing of it is replaced or patched.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer until standard input ends or {"do": "stop"} comes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer = Peer()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "stop":
            return
        try:
            answer = getattr(peer, request.pop("do"))(**request)
        except Exception as e:
            traceback.print_exc()
            answer = {"error": f"{type(e).__name__}: {e}"}
        answers.write(json.dumps(answer) + "\n")


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the highest since the last reset."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def release() -> None:
    """Give what is free back to the system, so that its account shows what is held (glibc)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Peer:
    """One model in kvpress's pipeline."""

    model: Any
    pipe: Any
    full: tuple[tuple[str, int, str], Any] | None = None  # the last pass that kept all, and of what it was

    def load(self, model: str, dtype: str, threads: int) -> dict[str, Any]:
        """Load a folder of safetensors; returns the versions at work."""
        import kvpress
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        self.torch, self.kvpress = torch, kvpress
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self.pipe = kvpress.KVPressTextGenerationPipeline(model=self.model, tokenizer=tokenizer)
        names = ("kvpress", "transformers", "torch", "optimum-quanto", "hqq")
        return {"versions": {"python": platform.python_version(), **{n: v for n in names if (v := _version(n))}}}

    def prefix(self) -> dict[str, Any]:
        """How many tokens of a chat prompt come before the user's text, by the tokenizer's template."""
        turn = [{"role": "user", "content": "MARK"}]
        text = self.pipe.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        before = text.split("MARK")[0]
        return {"tokens": len(self.pipe.tokenizer.encode(before, add_special_tokens=False))}

    def press(self, spec: dict[str, Any]) -> Any:
        """A press from {"press": class, "settings": {...}}; a setting that has a "press" is one itself."""
        settings = {k: self.press(v) if isinstance(v, dict) else v for k, v in spec["settings"].items()}
        return getattr(self.kvpress, spec["press"])(**settings)

    def answer(
        self, ids: str, name: str, cut: int, spec: dict[str, Any], attention: str, new_tokens: int
    ) -> dict[str, Any]:
        """Compress the first `cut` tokens, feed the rest, generate greedily: the text and what it took."""
        prompt = self._ids(ids, name)
        self.model.set_attn_implementation(attention)
        given = {"context_ids": prompt[:, :cut], "questions_ids": [prompt[:, cut:]]}
        release()
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        wall, cpu = time.perf_counter(), time.process_time()
        text = self.pipe.forward(given, press=self.press(spec), max_new_tokens=new_tokens)[0]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return {"text": text, "wall": wall, "cpu": cpu, "rss": before, "peak": resident("VmHWM")}

    def rss(self) -> dict[str, int]:
        """Bytes resident now, of what is in use."""
        release()
        return {"rss": resident("VmRSS")}

    def kept(self, ids: str, name: str, cut: int, spec: dict[str, Any], attention: str, out: str) -> dict[str, Any]:
        """Which of the first `cut` tokens each layer and head keeps: a bool mask (layers, heads, cut) in file `out`.

        Read off the cache itself: every kept key is looked up among the keys of a pass that keeps all. Presses that
        only mark what is dropped (heads of unequal length) are read from their marks.
        """
        from safetensors.torch import save_file
        from transformers import DynamicCache

        torch, prompt = self.torch, self._ids(ids, name)[:, :cut]
        self.model.set_attn_implementation(attention)
        if self.full is None or self.full[0] != (name, cut, attention):
            with torch.inference_mode():
                everything = DynamicCache()
                self.model.model(input_ids=prompt, past_key_values=everything)
            self.full = (name, cut, attention), everything
        full = self.full[1]
        with torch.inference_mode():
            cut_down = DynamicCache()
            with self.press(spec)(self.model):
                self.model.model(input_ids=prompt, past_key_values=cut_down)
        masks = []
        for index, (everything, some) in enumerate(zip(full.layers, cut_down.layers, strict=True)):
            mask = torch.stack([_found(a, b) for a, b in zip(everything.keys[0], some.keys[0], strict=True)])
            attention_module = self.model.model.layers[index].self_attn
            marked = getattr(attention_module, "masked_key_indices", None)
            if marked is not None:
                mask[marked[1], marked[2]] = False
                attention_module.masked_key_indices = None
            masks.append(mask)
        save_file({"kept": torch.stack(masks)}, out)
        return {"out": out}

    def quantise(
        self, ids: str, name: str, follow: str, backend: str, bits: int, axis: int, group: int, residual: int
    ) -> dict[str, Any]:
        """transformers' QuantizedCache: errors of K and V, bytes held, and how often the next token stays the same.

        All but the last token of the prompt is prefilled and quantised; then that token and all but the last of
        `follow` are fed at once to the full and to the quantised cache, and the most probable next tokens compared.
        """
        from transformers import DynamicCache, QuantizedCache

        torch, prompt, rest = self.torch, self._ids(ids, name), self._ids(ids, follow)
        fed = torch.cat([prompt[:, -1:], rest[:, :-1]], 1)
        self.model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            full = DynamicCache()
            packed = QuantizedCache(
                backend, self.model.config, bits, axis, axis, q_group_size=group, residual_length=residual
            )
            for cache in (full, packed):
                self.model.model(input_ids=prompt[:, :-1], past_key_values=cache)
            errors = _errors(full.layers, [_dequantised(layer) for layer in packed.layers])
            held = [_held(q) for x in packed.layers for q in (x._quantized_keys, x._quantized_values)]
            out = [self.model(input_ids=fed, past_key_values=cache).logits[0] for cache in (full, packed)]
        return {
            **errors,
            "codes": sum(codes for codes, _ in held),
            "scales": sum(scales for _, scales in held),
            "agree": [bool(x) for x in out[0].argmax(-1) == out[1].argmax(-1)],
            "nll": [float(_nll(x, rest[0])) for x in out],
        }

    def _ids(self, path: str, name: str) -> Any:
        from safetensors.torch import load_file

        return load_file(path)[name][None]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _found(everything: Any, some: Any) -> Any:
    """Which rows of (T, d) are among (n, d): bool (T,)."""
    import torch

    at = {row.tobytes(): i for i, row in enumerate(everything.contiguous().view(torch.uint8).numpy())}
    mask = torch.zeros(len(everything), dtype=torch.bool)
    mask[[at[row.tobytes()] for row in some.contiguous().view(torch.uint8).numpy()]] = True
    if int(mask.sum()) != len(some):
        raise ValueError("two positions have the same key: what was kept cannot be told")
    return mask


def _dequantised(layer: Any) -> tuple[Any, Any]:
    return layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)


def _errors(full: Any, packed: list[tuple[Any, Any]]) -> dict[str, float]:
    """Relative Frobenius error of all keys and of all values."""
    parts = {"k": [(x.keys, k) for x, (k, _) in zip(full, packed, strict=True)]}
    parts["v"] = [(x.values, v) for x, (_, v) in zip(full, packed, strict=True)]
    return {
        f"error_{side}": (
            sum(float((a - b).square().sum()) for a, b in pairs) / sum(float(a.square().sum()) for a, _ in pairs)
        )
        ** 0.5
        for side, pairs in parts.items()
    }


def _held(quantised: Any) -> tuple[int, int]:
    """Bytes of (codes, scales and zero points) of one tensor of either backend."""
    if isinstance(quantised, tuple):  # hqq: packed codes and a dictionary
        codes, meta = quantised
        return codes.untyped_storage().nbytes(), meta["scale"].nbytes + meta["zero"].nbytes
    codes = quantised._data  # quanto: a tensor that packs its codes in another one
    codes = getattr(codes, "_data", codes)
    return codes.untyped_storage().nbytes(), quantised._scale.nbytes + quantised._shift.nbytes


def _nll(logits: Any, target: Any) -> Any:
    return -logits.float().log_softmax(-1).gather(1, target[:, None]).mean()


if __name__ == "__main__":
    main()
