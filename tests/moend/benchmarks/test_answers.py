"""Final answers: gold cases for every rule of extraction and equality, and no text that crashes or hangs them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moend
from moend.benchmarks.answers import symbolic
from moend.benchmarks.answers.extract import equal, extract, grade, integer

ROOT = Path(moend.__file__).parent.parent
MATH = Path(os.environ.get("MOEND_SHARED", ROOT.parent / "shared")) / "data" / "math"
needs_math = pytest.mark.skipif(not MATH.is_dir(), reason="the math sets are not here")


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (MATH / f"{name}.jsonl").read_text(encoding="utf-8").split("\n") if line]


EXTRACTED = {
    r"So \boxed{42}.": "42",
    r"\boxed{1} no, \boxed{2}, and \boxed{3}": "3",  # several boxes: the last
    r"\boxed{7} then \boxed{12": "7",  # the last one was cut off
    r"\boxed{7": None,
    r"\boxed{}": None,
    r"\boxed{5} and then \boxed{ } or \boxed{$$}": "5",  # an empty one says nothing
    r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
    r"\boxed{\frac{\sqrt{a^{2}}}{b_{1}}}": r"\frac{\sqrt{a^{2}}}{b_{1}}",
    r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed{\left\{ x \right.}": r"\left\{ x \right.",  # an escaped brace closes nothing
    r"\boxed{\text{a} \\}": r"\text{a} \\",  # nor does a line break open anything
    r"\fbox{9}": "9",
    r"\boxed{x = \fbox{9}}": "9",
    r"\boxed {8}": "8",
    r"$\boxed 6$": "6",
    r"\boxed 6": None,  # where it ends is not to be seen
    r"\boxedtext{6}": None,
    r"{ code { \boxed{4} }": "4",
    r"} } \boxed{4}": "4",
    r"<think>\boxed{1}</think> It is \boxed{2}": "2",
    r"<think>\boxed{1}</think> I do not know.": None,
    "The answer is 12.": "12",
    "The final answer is: **12**": "12",
    r"Answer: $\frac{1}{2}$, as shown": r"\frac{1}{2}",
    r"answer = \(5\)": "5",
    "The answer is 3. No: the answer is 4.": "4",
    "The answer is 3.5": "3.5",
    "the answer is 12 because 5 + 7 = 12": "12",
    "The answer is 12\nand 13 is not": "12",
    r"The answer is 3. But \boxed{4}": "4",  # a box beats words
    "Hence x = 204": None,  # the last number is no answer
    "204": None,
    "answers are 5": None,
    "The answer is ": None,
    "": None,
}


@pytest.mark.req(10)
@pytest.mark.parametrize("text", EXTRACTED)
def test_extraction(text: str) -> None:
    assert extract(text) == EXTRACTED[text]


@pytest.mark.req(10)
def test_a_cut_off_text_answers_by_a_box_only() -> None:
    assert extract("The answer is 12", finished=False) is None  # of 123, perhaps
    assert extract(r"\boxed{12}. Let me check", finished=False) == "12"
    assert extract(r"\boxed{12}. So it is \boxed{1", finished=False) == "12"
    assert grade("... = 204", "204", "integer", finished=False) == (False, None)
    assert grade("... = 204", "204", "integer") == (False, None)


SAME = [
    ("42", "42"),
    ("$42$", "42"),
    ("42.", "42"),
    ("042", "42"),
    ("42.0", "42"),
    ("+42", "42"),
    (r"\$42", "42"),
    (r"\(42\)", "42"),
    ("1,234", "1234"),
    (r"10,\!080", "10080"),
    (r"10{,}080", "10,080"),
    (r"10\,080", "10080"),
    (r"11,\! 111,\! 111,\! 100", "11111111100"),
    (r"\$32,\!348", "32348"),
    ("58,500", r"58,\!500"),
    (r"\frac12", r"\frac{1}{2}"),
    (r"\frac 12", "0.5"),
    (r"\frac1{2}", "1/2"),
    (r"\frac{1}2", ".5"),
    (r"\dfrac{17}{50}", "0.34"),
    (r"\tfrac{17}{50}", r"\frac{34}{100}"),
    (r"\frac {1} {2}", r"\frac12"),
    (r"-\frac{35}{9}", r"\frac{-35}{9}"),
    (r"1\frac{4}{5}", r"\frac95"),
    ("137 1/2", r"137 \frac{1}{2}"),
    ("-1 1/2", "-1.5"),
    ("0.0000672", ".0000672"),
    (r"6.72 \times 10^{-5}", ".0000672"),
    (r"3 \cdot 10^4", "30000"),
    ("1.5e3", "1500"),
    (r"50\%", "50"),
    ("50%", r"50\%"),
    (r"50\%", r"\frac12"),
    ("0.5", r"50\%"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", r"90^\circ"),
    ("90°", "90"),
    (r"90 \text{ degrees}", r"90^\circ"),
    (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"),
    (r"15\mbox{ cm}^2", "15"),
    ("15 cm^2", r"15\mbox{ cm}^2"),
    ("15 square centimeters", r"15\mbox{ cm}^2"),
    ("864 cubic inches", r"864 \text{ in}^3"),
    (r"5.4 \text{ cents}", "5.4"),
    (r"12\pi \text{ units}", r"12\pi"),
    (r"3 \text{ apples}", "3"),
    ("x=5", "5"),
    ("5", "x=5"),
    (r"\theta = 30^\circ", "30"),
    ("f(x) = 2x+1", "2x+1"),
    ("m + n = 25", "25"),
    ("3 + 2 = 5", "5"),
    ("2x+3", "y = 2x + 3"),
    ("y=3+2x", "y = 2x + 3"),
    ("[-2,7]", r"x \in [-2,7]"),
    (r"2\sqrt{2} \approx 2.83", r"2\sqrt2"),
    (r"11\sqrt2", r"11 \sqrt{2}"),
    (r"\sqrt{242}", r"11\sqrt2"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("2+6i-2i", "2+4i"),
    ("q(p-1)", "pq-q"),
    (r"\frac{\cos x}{\sin x}", r"\cot x"),
    ("-5x+7y-11z-4=0", "5x - 7y + 11z + 4 = 0"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
    ("(15, -29)", "(15,-29)"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty)\cup(-\infty,2)"),
    (r"\left(\frac{3}{5},\frac{8}{3}\right]", r"(0.6, \frac83]"),
    ("-2, 1", "1,-2"),
    ("3, 5, 7", "3,5,7"),
    ("1 or -2", "1,-2"),
    (r"1 \text{ and } -2", "1,-2"),
    ("x = 1, x = -2", "1,-2"),
    ("1 , 100 , 200", "100, 200, 1"),
    (r"\{-2, 1, 3\}", r"\left\{ 3, -2, 1 \right\}"),
    (r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{19}"),
    (r"\{1+\sqrt5, 1-\sqrt5, -2\}", r"\{1\pm\sqrt{5},-2\}"),
    (
        r"\begin{bmatrix} -1/3 \\ 2/3 \\ 5/3 \end{bmatrix}",
        r"\begin{pmatrix} -\frac13 \\ \frac23 \\ \frac53 \end{pmatrix}",
    ),
    (r"\begin{pmatrix}-1&0\\0&-1\\\end{pmatrix}", r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}"),
    (r"2516_{8}", "2516_8"),
    ("2516", "2516_8"),
    ("Evelyn", r"\text{Evelyn}"),
    (r"\textbf{evelyn}", r"\text{Evelyn}"),
    ("an ellipse.", r"\text{ellipse}"),
    ("Even", r"\text{even}"),
    ("C", r"\text{(C)}"),
    (r"\textbf{(C)}", r"\text{(C)}"),
    (r"(\text{C})", "C"),
    ("(5)", "5"),
    (r"4 \, \text{p.m.}", "4"),
]
DIFFERENT = [
    ("42", "43"),
    ("-42", "42"),
    ("0.333", r"\frac13"),
    ("0.333333333", r"\frac13"),
    ("1.41421356", r"\sqrt{2}"),
    ("3.14", r"\pi"),
    ("0.05", r"50\%"),
    (r"0.5\%", r"50\%"),
    ("5 cm", r"5 \text{ m}"),
    (r"4 \text{ a.m.}", r"4 \text{ p.m.}"),
    (r"15 \text{ cm}", r"15\mbox{ cm}^2"),
    ("(1,234)", "1234"),
    ("1, 234", "1234"),
    ("(1,-2)", "(-2,1)"),
    ("1,-2", "(1,-2)"),
    ("(3,4)", "(3,4]"),
    ("(3,4)", "[3,4]"),
    (r"\{3,4\}", "(3,4)"),
    ("1", "1,-2"),
    ("1,1", "1,-2"),
    ("1,-2,3", "1,-2"),
    ("y=5", "x=5"),
    ("x=5", "y=5"),
    ("x^2=5", "5"),
    (r"\sqrt{x}=5", "5"),
    ("x>=5", "5"),
    ("2x=5", "5"),
    ("0", "5x - 7y + 11z + 4 = 0"),
    ("y = 2x + 4", "y = 2x + 3"),
    ("2516_9", "2516_8"),
    ("2517", "2516_8"),
    ("6-5", "6 - 5i"),
    ("3i", "3"),
    (r"3\mathrm{i}", "3"),
    (r"\begin{vmatrix} 1 & 0 \\ 0 & 1 \end{vmatrix}", r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}"),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("ates", r"\text{east}"),  # the product of the same letters
    ("west", r"\text{east}"),
    ("C", "(B)"),
    ("", "0"),
    (r"\frac{1}{0}", "0"),
    ("not 5", "5"),
    ("5 or 6", "5"),
]


@pytest.mark.req(10)
@pytest.mark.parametrize(("answer", "gold"), SAME)
def test_equal_answers(answer: str, gold: str) -> None:
    assert equal(answer, gold)
    assert grade(rf"Thus $\boxed{{{answer}}}$.", gold, "math") == (True, answer)


@pytest.mark.req(10)
@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_different_answers(answer: str, gold: str) -> None:
    assert not equal(answer, gold)


REPEATING = {
    r"0.\overline{3}": r"\frac13", r"0.1\overline{6}": r"\frac{1}{6}", r".\overline{142857}": r"\frac{1}{7}",
    r"-2.\overline{09}": r"-\frac{23}{11}", r"0.\overline3": r"\frac{1}{3}", r"0.\overline{9}": "1",
    r"12.3\overline{45}": r"\frac{679}{55}",
}  # fmt: skip


@pytest.mark.req(10)
@pytest.mark.parametrize("answer", REPEATING)
def test_repeating_decimals_are_exact(answer: str) -> None:
    assert equal(answer, REPEATING[answer]) and equal(REPEATING[answer], answer)
    assert not equal(answer, REPEATING[answer] + "1") and not equal(answer, "0.333")


@pytest.mark.req(10)
def test_the_braces_of_a_set_may_be_left_out() -> None:
    gold = r"\{1\pm\sqrt{5},-2\}"
    assert equal(r"-2, 1+\sqrt{5}, 1-\sqrt{5}", gold) and equal(gold, r"-2, 1+\sqrt{5}, 1-\sqrt{5}")
    assert equal("3, 2, 1", r"\{1,2,3\}")
    for other in ("1, 2", "(1, 2, 3)", "[1, 2, 3]", "1, 2, 2", "1", r"1, \{2, 3\}", r"\{1, 2, 3\}, 4"):
        assert not equal(other, r"\{1,2,3\}")


INTEGERS = {
    "25": 25, "025": 25, "0": 0, "000": 0, "999": 999, "$25$": 25, r"\textbf{25}": 25, "25.": 25, "25.0": 25,
    "25^\\circ": 25,
    "x = 25": 25, "m+n=25": 25, "20 + 5 = 25": 25, r"25 \text{ units}": 25, r"\text{25}": 25,
    "1000": None, "-25": None, "25.5": None, r"\frac{50}{2}": None, "25%": None, "1,000": None, "25, 26": None,
    "": None,
    "25 or 26": None, "twenty-five": None, "2 5x": None, "x^2 = 25": None, "x > 25": None, "x >= 25": None, "٢٥": None,
}  # fmt: skip


@pytest.mark.req(10)
@pytest.mark.parametrize("answer", INTEGERS)
def test_integers(answer: str) -> None:
    assert integer(answer) == INTEGERS[answer]


@needs_math
@pytest.mark.parametrize("name", ["aime24", "aime25"])
def test_aime_golds_in_all_their_forms(name: str) -> None:
    for row in rows(name):
        gold = row["answer"]
        for form in ("{}", "{:0>3}", "${}$", "x = {}", r"\text{{{}}}", "{}.0", "{} "):
            said = form.format(gold)
            assert grade(rf"so \boxed{{{said}}}", gold, "integer")[0], said
            assert grade(f"The answer is {said}.", gold, "integer")[0], said
        assert not grade(rf"\boxed{{{(int(gold) + 1) % 1000}}}", gold, "integer")[0]


@needs_math
def test_every_math_gold_is_itself_and_its_solutions_box() -> None:
    for row in rows("math500"):
        gold = row["answer"]
        assert grade(row["solution"], gold, "math") == (True, gold)
        assert grade(rf"so \boxed{{ {gold} }}", gold, "math")[0], gold
        assert grade(f"**Answer:** ${gold}$", gold, "math")[0], gold


@needs_math
def test_math_golds_differ_from_each_other_as_their_texts_do() -> None:
    """Neighbours that are not the same number written otherwise: no rule throws away what tells answers apart."""
    golds = [r["answer"] for r in rows("math500")]
    alike = [(a, b) for a, b in itertools.pairwise(golds) if a != b and equal(a, b)]
    assert alike == [("5", "x=5")]


PIECES = [
    "\\boxed{", "\\boxed", "\\fbox{", "}", "{", "\\{", "\\", "$", "answer is ", "Answer:", "\\frac", "\\sqrt",
    "1", "25",
    ",",     "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "(", ")", "[", "]", "^", "_8", "%", "\\pm",
    "\\cup", "=",
    "x", " ", "\n", "\\text{", " cm", "</think>", "<think>", "\\times10^{", "9", "\\in",
    "\\approx", "\0", "\1", "\2", "²", "١",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=60)


@pytest.mark.req(10)
@settings(max_examples=300, deadline=None)
@given(TEXTS, st.booleans())
def test_no_text_crashes_extraction_or_the_integer_grade(text: str, finished: bool) -> None:
    ok, answer = grade(text, "25", "integer", finished=finished)
    assert answer is None or (answer in text and answer == answer.strip() != "")
    assert not ok or "25" in text


@pytest.mark.req(10)
@settings(max_examples=40, deadline=None)
@given(TEXTS)
def test_no_answer_crashes_equality(text: str) -> None:
    for gold in (r"\frac{3}{2}", "(2,4)", r"\text{even}"):
        assert equal(text, gold) in (True, False)


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4), st.integers(1, 50))
def test_numbers_are_exact(top: int, bottom: int, factor: int) -> None:
    written = rf"\frac{{{top}}}{{{bottom}}}"
    assert equal(rf"\dfrac{{{top * factor}}}{{{bottom * factor}}}", written)
    assert not equal(rf"\frac{{{top * factor + 1}}}{{{bottom * factor}}}", written)
    assert equal(f"{top / 1000:,.3f}", rf"\frac{{{top}}}{{1000}}")


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 50_000,
        "\\boxed " * 50_000,
        "{" * 200_000,
        "answer is" * 50_000,
        "answer " + "* " * 100_000,
        "\\boxed{" + "1," * 100_000 + "}",
    ],
    ids=range(6),
)
def test_long_texts_take_linear_time(text: str) -> None:
    """Each of these would take hours if it were read again from every place."""
    assert grade(text, "1", "math")[0] is False


@pytest.mark.req(10)
@pytest.mark.parametrize("endless", ["10^{999999999}", "9^{9^{9^{9}}}", "1000000000!", "(x+y+z+1)^{5000}"])
def test_a_formula_without_end_is_given_up(endless: str, caplog: pytest.LogCaptureFixture) -> None:
    worker = symbolic.Worker(limit=1)
    try:
        assert worker.equal("x+y", "y+x")
        assert worker.equal(endless, "1") is False
        assert "counted as different" in caplog.text
        assert worker.equal("x+y", "y+x")  # the next one starts another process
    finally:
        worker.close()


def test_a_process_that_dies_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    worker = symbolic.Worker()
    try:
        assert worker.equal("x+y", "y+x")
        assert worker._process is not None
        worker._process.kill()
        worker._process.wait()
        assert worker.equal("x+y", "y+x")
        assert not worker.equal("x+y", "y-x")
    finally:
        worker.close()


def test_a_process_that_never_answers_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even where it does not end itself."""
    script = tmp_path / "hangs.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(1000)\n")
    monkeypatch.setattr(symbolic, "__file__", str(script))
    monkeypatch.setattr(symbolic, "GRACE_S", 0.1)
    worker = symbolic.Worker(limit=0.2)
    try:
        assert worker.equal("1", "1") is False
        assert "no verdict" in caplog.text
    finally:
        worker.close()


def test_equality_works_off_the_main_thread() -> None:
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(equal(f"{i}\\sqrt{{8}}", f"{2 * i}\\sqrt{{2}}")))
        for i in (3, 5, 7)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [True] * 3


@pytest.mark.process
def test_grading_words_and_numbers_starts_no_process_and_imports_no_sympy() -> None:
    code = (
        "import sys; from moend.benchmarks.answers import extract as answers, symbolic\n"
        "assert answers.grade(r'\\boxed{\\frac12}', '0.5', 'math')[0]\n"
        "assert answers.grade(r'\\boxed{025}', '25', 'integer')[0]\n"
        "assert symbolic._worker._process is None and 'sympy' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
