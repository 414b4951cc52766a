# SPDX-License-Identifier: Apache-2.0
"""Many questions over one long document, each in a fork: the document is prefilled once."""

import random
from dataclasses import dataclass
from typing import Any

import sglang as sgl

_FIRST = ("amber", "bronze", "coral", "dusty", "ember", "frozen", "golden", "hollow")
_SECOND = ("violin", "anchor", "basket", "candle", "dragon", "falcon", "guitar", "hammer")
_FILLER = (
    " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)


@dataclass(frozen=True)
class Document:
    """A text with facts in it.

    Attributes:
        text: about `repeats` x 22 words of filler, with facts at equal distances.
        facts: the number of each name.
    """

    text: str
    facts: dict[str, str]


def make_document(repeats: int, facts: int, seed: int) -> Document:
    """Hide `facts` facts evenly in `repeats` runs of filler."""
    source = random.Random(seed)
    names = [f"{a}-{b}" for a in _FIRST for b in _SECOND]
    known = {name: str(source.randrange(10000, 100000)) for name in source.sample(names, facts)}
    parts = [_FILLER] * repeats
    for number, (name, value) in enumerate(known.items()):
        place = (2 * number + 1) * repeats // (2 * facts)
        parts[place] += f" The magic number for {name} is {value}."
    return Document("".join(parts).strip(), known)


@sgl.function
def ask_all(s: Any, before: str, text: str, questions: list[str], after: str) -> None:
    """Answer every question in a fork of its own."""
    s += before + text
    s.sync()  # a prefix is computed once only if its text has arrived
    forks = s.fork(len(questions))
    for fork, question in zip(forks, questions, strict=True):
        fork += f"\n\n{question}{after}"
        fork += sgl.gen("answer", max_tokens=24, temperature=0)
    s["answers"] = [fork["answer"] for fork in forks]
    s["metas"] = [fork.get_meta_info("answer") for fork in forks]


def run(url: str, document: Document, before: str, after: str) -> dict[str, Any]:
    """Answers, how many name the right number, and the cached tokens of each branch."""
    questions = [f"What is the magic number for {name}?" for name in document.facts]
    backend = sgl.RuntimeEndpoint(url)
    state = ask_all.run(
        before=before, text=document.text, questions=questions, after=after, backend=backend
    )
    answers, values = state["answers"], document.facts.values()
    return {
        "answers": answers,
        "right": sum(v in answer for v, answer in zip(values, answers, strict=True)),
        "cached_tokens": [meta["cached_tokens"] for meta in state["metas"]],
        "prompt_tokens": [meta["prompt_tokens"] for meta in state["metas"]],
    }
