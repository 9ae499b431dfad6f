"""Tasks of lm-evaluation-harness as a benchmark: its documents, prompts, limits, stop strings, filters and metrics.

The harness builds every prompt and scores every answer with its own code; moend renders the prompt to ids, compresses
and decodes. So a task runs under many methods in one sweep, each example's prompt is read once for all of them, and a
full cache gives the harness' own result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from moend.benchmarks.base import Benchmark, Rendered, Sample
from moend.benchmarks.prompts import added_bos, encode
from moend.benchmarks.terms import Terms
from moend.budget import Arch
from moend.errors import Blocked, UserError, unknown
from moend.models.hub import is_off
from moend.models.load import TEMPLATE_DATE

NEW_TOKENS = 256  # of a task that names no limit: the harness' default
FEWSHOT_SEED = 1234  # the harness' default
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
INVALID = "[invalid]"  # what the harness' filters leave where they find no answer


@dataclass(frozen=True, kw_only=True)
class Harness(Benchmark):
    """Tasks, groups and tags of lm-evaluation-harness whose output_type is generate_until.

    include_path: a folder of task files of one's own; their names come first. num_fewshot: worked examples before the
    document (null: the task's own number). metric_name: what counts, as the harness writes it
    (`exact_match,strict-match`; null: the task's first metric after its first filter); records and results hold all.
    context_field: the document's field that is the context, for question_visible=false; what follows it in the prompt
    is then the question. Without it the question is the document, after the worked examples and the description.
    length: tokens of prompt and output; a longer prompt is cut from the left, as the harness does.
    chat_template: official and none are plain text, the harness' default; all is its --apply_chat_template.
    """

    include_path: str | None = None
    num_fewshot: int | None = None
    metric_name: str | None = None
    context_field: str | None = None

    run_only: ClassVar[tuple[str, ...]] = ("rows", "limit", "include_path")
    scored_meta: ClassVar[tuple[str, ...]] = ("doc_id",)

    def __post_init__(self) -> None:
        if isinstance(self.tasks, str):
            self._set("tasks", (self.tasks,))
        self._set("all_tasks", tuple(self.tasks or ()))
        super().__post_init__()
        if self.split != "test":
            raise UserError(f"{self.name} has no {self.split} split: the harness' tasks are for evaluation")

    # Tasks

    @property
    def loaded(self) -> dict[str, Any]:
        """The harness' tasks by name, groups and tags resolved; Blocked where data are missing and the hub is off."""
        asked = (self.tasks or (), self.include_path, self.num_fewshot)
        if asked not in _LOADED:
            _LOADED[asked] = _tasks(*asked)
        return _LOADED[asked]

    def absent(self) -> str | None:
        """What a run would fetch first; None where all data are here. No network."""
        return None if (self.tasks or (), self.include_path, self.num_fewshot) in _LOADED else self._missing

    @cached_property
    def _missing(self) -> str | None:
        try:
            with _offline():
                self.loaded  # noqa: B018 (loads)
        except Blocked as e:
            return str(e)
        return None

    def available(self) -> str | None:
        """Why the data cannot be had: they are not here and the hub is switched off."""
        return self.absent() if is_off() else None

    def fetch(self) -> None:
        """Bring the tasks' data sets to this machine."""
        self.loaded  # noqa: B018 (loads)

    @property
    def task_names(self) -> tuple[str, ...]:
        """Single tasks; groups as they were named where their data are not here."""
        return tuple(self.tasks or ()) if self.absent() else tuple(self.loaded)

    def expected(self) -> dict[str, int]:
        """Documents per task; the limit (or none) where the data are not here."""
        return dict.fromkeys(self.task_names, self.limit or 0) if self.absent() else super().expected()

    def fingerprint(self) -> str:
        """Of the samples; of the tasks' names where the data are not here, for a key that changes once they are."""
        if self.absent():
            return hashlib.sha256(repr(("not here", self.tasks)).encode()).hexdigest()
        return super().fingerprint()

    def identity(self) -> dict[str, Any]:
        """The base's, with the harness' version and each task's version and configuration."""
        tasks = {} if self.absent() else {name: _described(task) for name, task in self.loaded.items()}
        return {**super().identity(), "harness": {"lm_eval": version("lm_eval"), "tasks": tasks}}

    def terms(self) -> tuple[Terms, ...]:
        """Of each task's data set: where its terms stand."""
        tasks = {} if self.absent() else self.loaded
        found = {name: str(task.DATASET_PATH or "made by the task's code") for name, task in tasks.items()}
        return tuple(
            Terms(name, f"{name} of lm_eval, data from {found.get(name, 'the hub')}", "as its own card says")
            for name in self.task_names
        )

    # Samples

    def make_samples(self) -> list[Sample]:
        """The first `limit` documents of each task, or all, as the harness takes them."""
        return [sample for task in self.loaded.values() for sample in self._of(task)]

    def _of(self, task: Any) -> Iterator[Sample]:
        chat = self.chat_template == "all"
        task.set_fewshot_seed(FEWSHOT_SEED)
        with _quiet():
            task.build_all_requests(
                limit=self.limit or self.rows,
                apply_chat_template=chat,
                fewshot_as_multiturn=True,
                chat_template=_turns if chat else None,
            )
        for request in task.instances:
            prompt = str(request.args[0])
            meta = {"doc_id": request.doc_id, "turns": json.loads(prompt) if chat else None}
            said = meta["turns"]["turns"][-1]["content"] if chat else prompt
            asked = self._asked(task, request.doc, said, f"{task.task_name} {request.doc_id}")
            before = prompt.removesuffix(asked) if asked else prompt
            yield Sample(task.task_name, str(request.doc_id), before, asked, "", _gold(task, request.doc), meta)

    def _asked(self, task: Any, doc: Mapping[str, Any], said: str, name: str) -> str:
        """The end of a prompt that is its question; empty where nothing says where it begins."""
        if self.context_field is not None:
            if self.context_field not in doc:
                raise unknown(f"benchmark.context_field of {name}:", self.context_field, doc)
            context = str(doc[self.context_field])
            if not context or said.count(context) != 1:
                raise UserError(
                    f"{name}: benchmark.context_field={self.context_field} stands {said.count(context)} times in the"
                    " prompt; once is needed to tell context from question"
                )
            return said.partition(context)[2]
        own = str(task.doc_to_text(doc))
        at = said.rfind(own)
        return said[at:] if own and at > 0 else ""

    def unseen(self) -> str | None:
        """Why question_visible=false means nothing here; None where every prompt says where its question begins."""
        bare = next((s for s in self.samples() if not s.question), None)
        if bare is None:
            return None
        return (
            f"{bare.task} does not say where its question begins: set benchmark.context_field= to the field of its"
            " documents that is the context, or benchmark.num_fewshot="
        )

    # Prompts

    def uses_chat(self, task: str) -> bool:
        """Only where it is asked for."""
        return self.chat_template == "all"

    def new_tokens(self, task: str) -> int:
        """The task's own limit."""
        return NEW_TOKENS if self.absent() else int(_limits(self.loaded[task])["max_gen_toks"])

    def stops(self, task: str) -> tuple[str, ...]:
        """The task's own stop strings."""
        return () if self.reasoning else tuple(s for s in _limits(self.loaded[task])["until"] if s)

    def reference_length(self, arch: Arch) -> int:
        """What the output leaves of `length`, or of the model's positions."""
        return min(self.length or arch.max_positions, arch.max_positions) - max(
            map(self.output_tokens, self.task_names)
        )

    def check(self, arch: Arch, max_new_tokens: int | None = None) -> None:
        """Refuse output limits that leave no room for a prompt."""
        new, room = self.fed_tokens(max_new_tokens), min(self.length or arch.max_positions, arch.max_positions)
        if new >= room:
            raise UserError(f"{self.name}: {new} new tokens leave no room for a prompt in {room} positions")

    def render(
        self, sample: Sample, tokenizer: Any, arch: Arch, *, chat: bool, max_new_tokens: int | None = None
    ) -> Rendered:
        """The harness' prompt as its `hf` model reads it: too long, it loses its beginning."""
        new = self.output_tokens(sample.task, max_new_tokens)
        text, turns = sample.context + sample.question, sample.meta["turns"]
        if turns is not None:
            if not getattr(tokenizer, "chat_template", None):
                raise UserError("the tokenizer has no chat template: set benchmark.chat_template=none")
            told = {"tokenize": False, "date_string": TEMPLATE_DATE}
            told |= {"add_generation_prompt": turns["answers"], "continue_final_message": not turns["answers"]}
            text = str(tokenizer.apply_chat_template(turns["turns"], **told))
        bos = added_bos(tokenizer)
        if bos and text.startswith(tokenizer.bos_token):
            bos = ()
        own, spans = encode(tokenizer, text)
        ids, room = (*bos, *own), min(self.length or arch.max_positions, arch.max_positions) - new
        if room < 1 or not ids:
            raise UserError(f"{sample.task} {sample.id}: {new} new tokens leave no room for a prompt of {len(ids)}")
        cut = max(len(ids) - room, 0)
        inside = len(ids)
        if sample.question:
            at = text.rfind(sample.question.strip())
            if at < 0:
                raise UserError("the chat template rewrites the prompt: set benchmark.chat_template=none")
            inside = len(bos) + sum(end <= at for _, end in spans)
        return Rendered(
            sample=sample,
            ids=ids[cut:],
            context_tokens=max(inside - cut, 0),
            max_new_tokens=new,
            truncated=cut,
            stop=self.stops(sample.task),
            chat=turns is not None,
            asked=(sample.question, ""),
            told=self.thinking,
        )

    # Scores

    def metric(self, task: str) -> str:
        """The metric and filter that count, as the harness writes them."""
        if self.absent():
            return self.metric_name or "the task's own"
        found = _names(self.loaded[task])
        if self.metric_name is None:
            return found[0]
        if self.metric_name not in found:
            raise unknown(f"benchmark.metric_name of {task}:", self.metric_name, found)
        return self.metric_name

    def score(self, sample: Sample, text: str, *, finished: bool = True, opened: bool = False) -> dict[str, Any]:
        """The harness' filters and metrics on one answer. A metric of a whole corpus is that of this one example."""
        task, name = self.loaded[sample.task], self.metric(sample.task)
        values, answers = self._values(task, sample.meta["doc_id"], self.final_text(text, opened=opened) or "")
        each = {k: float(task.aggregation()[k.partition(",")[0]]([v])) for k, v in values.items()}
        if name not in each:
            raise unknown(f"metric of {sample.task}:", name, each)
        answer = answers[name.partition(",")[2]]
        return {"score": each[name], "answer": None if answer == INVALID else str(answer), "metrics": each}

    @staticmethod
    def _values(task: Any, doc_id: int, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the harness makes of an answer: values by metric and filter, and the answers by filter."""
        from lm_eval.api.instance import Instance

        doc = task.eval_docs[doc_id]
        asked = Instance("generate_until", doc, ("", {}), 0, (task.task_name, doc_id, 1), resps=[text])
        values: dict[str, Any] = {}
        for chosen in task._filters:
            chosen.apply([asked])
            found = task.process_results(doc, [asked.filtered_resps[chosen.name]])
            values |= {f"{metric},{chosen.name}": value for metric, value in found.items()}
        return values, asked.filtered_resps

    def aggregated(self, records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        """The harness' own result of each task: its aggregation over all records, corpus metrics included."""
        found: dict[str, dict[str, float]] = {}
        for name in dict.fromkeys(r["task"] for r in records):
            task = self.loaded[name]
            values: dict[str, list[Any]] = {}
            for r in records:
                if r["task"] == name:
                    text = self.final_text(r["text"], opened=r.get("thinking", False)) or ""
                    for key, value in self._values(task, r["scored_meta"]["doc_id"], text)[0].items():
                        values.setdefault(key, []).append(value)
            how = task.aggregation()
            found[name] = {key: float(how[key.partition(",")[0]](each)) for key, each in values.items()}
        return found

    def caution(self, samples: int) -> str | None:
        """Where the harness would sample: here generation= says how answers are drawn."""
        if self.absent():
            return None
        drawn = [name for name, task in self.loaded.items() if _limits(task).get("do_sample")]
        return f"{', '.join(drawn)}: the task's temperature is not used, generation= says it" if drawn else None


# The harness


_LOADED: dict[tuple[tuple[str, ...], str | None, int | None], dict[str, Any]] = {}  # by what was asked for


def _tasks(names: tuple[str, ...], include_path: str | None, num_fewshot: int | None) -> dict[str, Any]:
    """Tasks by name. UserError for what does not exist or cannot run here; Blocked where data cannot be fetched."""
    with _quiet():
        manager = _manager(names, include_path)
        for name in names:
            if name not in manager.all_tasks:
                near = difflib.get_close_matches(name, manager.all_tasks, n=1)
                hint = f" Did you mean '{near[0]}'?" if near else ""
                raise UserError(
                    f"unknown lm_eval task '{name}'.{hint} `lm_eval ls tasks` lists them, and benchmark.include_path="
                    " adds a folder of your own"
                )
        try:
            found: dict[str, Any] = manager.load(list(names))["tasks"]
        except (OSError, RuntimeError, ValueError) as e:  # the hub is off or away, or has no such data
            first = " ".join(str(e).split())[:300]
            raise Blocked(f"data of {', '.join(names)}: {first}") from e
    for name, task in found.items():
        _refuse(name, task)
        own = task.get_config("num_fewshot")
        if own != 0:  # as there: a task that says 0 means it
            task.set_config(key="num_fewshot", value=own or 0 if num_fewshot is None else num_fewshot)
    return found


def _manager(names: tuple[str, ...], include_path: str | None) -> Any:
    """The harness' index. All of it takes many seconds, so folders with a name's first word are looked into first."""
    import lm_eval.tasks

    if include_path is not None and not Path(include_path).expanduser().is_dir():
        raise UserError(f"benchmark.include_path={include_path} is not a folder")
    mine = [] if include_path is None else [str(Path(include_path).expanduser())]
    home, words = Path(str(lm_eval.tasks.__file__)).parent, {name.split("_")[0] for name in names}
    near = [str(p) for p in sorted(home.iterdir()) if p.is_dir() and p.name.split("_")[0] in words]
    for folders in (mine, near + mine):
        manager = lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False)
        if folders and set(names) <= set(manager.all_tasks):
            return manager
    return lm_eval.tasks.TaskManager(include_path=mine or None)


def _refuse(name: str, task: Any) -> None:
    """UserError for a task that a record of one answer cannot hold."""
    if task.OUTPUT_TYPE != "generate_until":
        raise UserError(
            f"{name} is a {task.OUTPUT_TYPE} task: it compares likelihoods of several texts, and a cell's record holds"
            " one answer: run it with moend-lm-eval --model moend (docs/lm_eval.md)"
        )
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(f"{name} runs code that the model writes: moend does not; use moend-lm-eval --model moend")
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"{name} shows pictures or sounds: moend reads text only")
    if (repeats := task.get_config("repeats") or 1) > 1:
        raise UserError(f"{name} votes over {repeats} answers: a record holds one; use moend-lm-eval --model moend")


def _limits(task: Any) -> dict[str, Any]:
    """The task's generation settings as the harness reads them: max_gen_toks, until, do_sample ..."""
    from lm_eval.models.utils import normalize_gen_kwargs

    return dict(normalize_gen_kwargs(task.config.generation_kwargs, NEW_TOKENS))


def _names(task: Any) -> list[str]:
    """Metrics of a task after each of its filters, as the harness writes them."""
    return [f"{metric},{chosen.name}" for chosen in task._filters for metric in task.aggregation()]


def _gold(task: Any, doc: Mapping[str, Any]) -> tuple[str, ...]:
    """The right answers as texts."""
    target = task.doc_to_target(doc)
    if isinstance(target, int) and task.config.doc_to_choice is not None:
        target = task.doc_to_choice(doc)[target]
    return tuple(str(x) for x in target) if isinstance(target, list) else (str(target),)


def _described(task: Any) -> dict[str, Any]:
    """A task's version and the hash of its configuration; where its data lie is no part of it."""
    config = {k: v for k, v in task.dump_config().items() if k not in ("dataset_kwargs", "fewshot_config")}
    config["metadata"] = {k: v for k, v in (config.get("metadata") or {}).items() if k != "config_source"}
    fewshot = dataclasses.asdict(task.fewshot_cfg)
    text = ADDRESS.sub("", json.dumps([config, fewshot], sort_keys=True, default=str))
    return {"version": str(task.VERSION), "config": hashlib.sha256(text.encode()).hexdigest()}


def _turns(turns: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """A chat that no tokenizer has seen yet, in place of a chat template's text."""
    return json.dumps({"turns": turns, "answers": add_generation_prompt}, ensure_ascii=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness' progress bars are not shown."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """No network: data that are not here are not fetched."""
    import datasets
    import huggingface_hub.constants

    places = ((huggingface_hub.constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE"))
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)


BENCHMARK = Harness
