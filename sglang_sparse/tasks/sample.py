# SPDX-License-Identifier: Apache-2.0
"""The data that tasks produce: problems before they are laid out, samples after."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sglang_sparse.tasks.vocabulary import Kind
from sglang_sparse.tasks.words import Split

FillerStyle = Literal["text", "noise"]


@dataclass(frozen=True)
class Needle:
    """A sentence to hide in the context.

    Attributes:
        text: The sentence, without surrounding whitespace.
        depth: Where it goes, as a fraction of the context: 0 is the start, 1 the end.
        reply: For a turn of a dialogue: the user asks ``text`` here, and this is the answer.
        parts: Of a fact that any sentence with all of them may state: its subject, its value, and
            what else it names.
    """

    text: str
    depth: float
    reply: str | None = None
    parts: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Question:
    """A question, the full answer expected, and the values in it that are scored.

    Attributes:
        value_kind: Which words of a reply are values.
        parts: Where any question with these phrases has the same answer: what it asks about.
    """

    task: str
    prompt: str
    answer: str
    values: tuple[str, ...]
    value_kind: Kind = "number"
    parts: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Problem:
    """Needles and the questions about them, not yet placed in a context of some length.

    ``body`` replaces the filler by pieces of its own (word lists have no haystack). ``ordered``
    says that the answer depends on the order of the needles.
    """

    needles: tuple[Needle, ...]
    questions: tuple[Question, ...]
    style: FillerStyle = "text"
    body: tuple[str, ...] | None = None
    ordered: bool = False


@dataclass(frozen=True)
class Sample:
    """One prompt with its answer.

    Attributes:
        task: Name of the task, a key of ``sglang_sparse.tasks.TASKS``.
        split: What it was drawn from, see ``TaskSuite``.
        seed: Seed given to the generator.
        index: Number of the sample under that seed.
        length: Number of tokens asked for; ``len(prompt_ids)`` plus the answer fits in it.
        content: The last user message, for a chat API.
        prompt: The full prompt with chat markers; it encodes to ``prompt_ids``.
        prompt_ids: Token ids of ``prompt``.
        answer: The expected reply.
        answer_ids: Token ids of the reply and the end-of-turn token.
        values: What exact scoring looks for in a reply, in order.
        needle_spans: ``(first, last + 1)`` token positions of every needle in ``prompt_ids``.
        depth: Depth of the first needle that the question asks about, in [0, 1].
        value_kind: Which words of a reply are values.
        history: ``(role, message)`` of the turns before ``content``.
    """

    task: str
    split: Split
    seed: int
    index: int
    length: int
    content: str
    prompt: str
    prompt_ids: list[int] = field(repr=False)
    answer: str
    answer_ids: list[int] = field(repr=False)
    values: tuple[str, ...]
    needle_spans: tuple[tuple[int, int], ...]
    depth: float
    value_kind: Kind = "number"
    history: tuple[tuple[str, str], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as the ``messages`` of an OpenAI chat request."""
        turns = (*self.history, ("user", self.content))
        return [{"role": role, "content": content} for role, content in turns]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return asdict(self)
