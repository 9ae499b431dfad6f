"""Every benchmark names the data sets that it reads, and each has a licence or terms that the documents show."""

from __future__ import annotations

import pytest

from moend.benchmarks import benchmark, names, terms
from moend.benchmarks.longbench import TABLE
from moend.errors import UserError
from tests import ROOT


@pytest.mark.parametrize("name", names())
def test_every_benchmark_names_the_terms_of_its_data(name: str) -> None:
    found = benchmark(name).terms()
    assert found and all(t.source.strip() and t.licence.strip() for t in found)


def test_every_task_of_longbench_has_terms_of_its_own() -> None:
    assert set(TABLE) <= set(terms.table())
    (collection, samsum) = benchmark("longbench", tasks=("samsum",)).terms()
    assert collection.name == "LongBench" and "NC" in samsum.licence


def test_terms_follow_what_is_read() -> None:
    own = {
        "niah": {"haystack": "text", "haystack_file": "x.txt"},
        "continuation": {"text_file": "x.txt"},
        "recall": {"data_dir": "x"},
    }
    for name, fields in own.items():
        assert [t.name for t in benchmark(name, **fields).terms()] == ["own"]
        assert "own" not in [t.name for t in benchmark(name).terms()]
    assert [t.name for t in benchmark("niah", phrasing=0).terms()] == ["jargon"]
    assert {"SQuAD", "HotpotQA"} <= {t.name for t in benchmark("ruler", data_dir="x").terms()}


def test_a_name_that_is_not_in_the_table() -> None:
    with pytest.raises(UserError, match=r"unknown data set 'jargn'. Did you mean 'jargon'\?"):
        terms.of("jargn")


def test_the_documents_show_the_table() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for t in terms.table().values():
        assert f"| {t.name} | {t.source} | {t.licence} |" in page, t.name
