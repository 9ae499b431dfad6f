"""RULER's official wordings, which make prompts equal, and a prompt in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """An official wording with `{context}` in it, what begins the answer, and the tokens left for the answer."""

    text: str  # the user's turn, with fields in braces
    answer: str  # what the answer begins with
    new_tokens: int  # the official output limit


NIAH = Template(
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {type_needle_v} afterwards.\n{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?",
    " The special magic {type_needle_v} for {query} mentioned in the provided text are",
    128,
)
VT = Template(
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assgined the "
    "value {query}, they are: ",
    30,
)
CWE = Template(
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
    120,
)
FWE = Template(
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
    50,
)
QA = Template(
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {query}",
    " Answer:",
    32,
)


@dataclass(frozen=True)
class Piece:
    """An official prompt in parts: their concatenation is the official `input`."""

    head: str  # before the context
    context: str  # the long text
    tail: str  # the question
    answer: str  # what the answer begins with
    gold: tuple[str, ...]  # official `outputs`

    @property
    def text(self) -> str:
        """The official `input`."""
        return self.head + self.context + self.tail + self.answer


def filled(template: Template, context: str, gold: Sequence[str], **fields: object) -> Piece:
    """A template with its fields filled in."""
    head, tail = template.text.split("{context}")
    told = (head.format(**fields), context, tail.format(**fields), template.answer.format(**fields))
    return Piece(*told, tuple(gold))
