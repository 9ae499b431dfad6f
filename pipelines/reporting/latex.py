"""tables.tex: the tables of a sweep for a paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipelines.cli.terminal import budget, size
from pipelines.reporting.match import Comparison
from pipelines.reporting.tables import DELTA_TITLES, ablations, beside, caption, partial, pivots
from pipelines.results.sweep import Row, Sweep


def latex(sweep: Sweep, compared: Sequence[Comparison]) -> str:
    r"""tables.tex: methods by budgets with intervals, differences, published numbers; needs \usepackage{booktabs}."""
    out = [f"% {sweep.name}: {sweep.manifest['command']}", r"% needs \usepackage{booktabs}"]
    out += [f"% {line.strip('*')}" for line in partial(sweep) if line]
    for p in pivots(sweep.rows):
        head = ["method", *(budget(b) for b in p.budgets)] if p.budgets else ["method", "score"]
        body = [[tex(r.series), _tex_score(r, False), *[""] * (len(head) - 2)] for r in p.full]
        for name, line in p.lines:
            marks = [
                r is not None and r.result is not None and r.result["score"] == p.best(i) for i, r in enumerate(line)
            ]
            body.append([tex(name), *(_tex_score(r, m) for r, m in zip(line, marks, strict=True))])
        out += _tabular(
            f"{p.title}. Scores with 95 % intervals; below, bytes after the prompt and at the peak; bold: best. "
            f"{p.detectable(sweep.differences)}",
            head,
            body,
        )
    if chain := ablations(sweep.differences):
        plain = [[tex(x) for x in line] for line in chain]
        out += _tabular("Paired differences over the same examples.", DELTA_TITLES, plain)
    for c in compared:
        head, body = beside(c)
        italic = [[tex(line[0]), *(_theirs(x, i) for i, x in enumerate(line[1:]))] for line in body]
        out += _tabular(f"{c.table.paper}, {c.table.title}: {caption(c)}. Published in italics.", head, italic)
    return "\n".join(out) + "\n"


def _theirs(text: str, i: int) -> str:
    return rf"\textit{{{tex(text)}}}" if i % 2 and text else tex(text)


def _tex_score(row: Row | None, best: bool) -> str:
    if row is None:
        return "--"
    if (r := row.result) is None:
        return rf"\emph{{{tex(row.state.partition(':')[0])}}}"
    score = rf"\mathbf{{{r['score']:.3f}}}" if best else f"{r['score']:.3f}"
    held = f"{size(r['resident_bytes'])}, {size(r['resident_bytes_peak'])}"
    spread = "" if r["score_low"] is None else rf"\,{{\scriptstyle [{r['score_low']:.3f},\,{r['score_high']:.3f}]}}"
    return rf"\shortstack{{${score}{spread}$\\{{\scriptsize {tex(held)}}}}}"


def _tabular(title: str, head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    lines = [r"\begin{table}", r"\centering\small", rf"\caption{{{tex(title)}}}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule"]
    lines += [" & ".join(tex(x) for x in head) + r" \\", r"\midrule"]
    lines += [" & ".join(line) + r" \\" for line in body]
    return ["", *lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]


_TEX = {c: "\\" + c for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def tex(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(_TEX.get(c, c) for c in text)
