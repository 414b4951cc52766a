# SPDX-License-Identifier: Apache-2.0
"""Scenario files, and the conversations that they describe.

A scenario is a JSON file of `loadtest/scenarios/`. Lengths are given in words, or in token ids for
the `generate` API. The records hold the lengths in tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "scenarios"
Range = tuple[int, int]
_WORDS = (  # noqa: SIM905
    "river stone light paper garden window market winter silver "
    "engine bridge morning letter forest number signal harbor circle "
    "orange planet record system island copper summer basket"
).split()


@dataclass(frozen=True)
class Scenario:
    """One kind of use. Ranges are (least, most), and numbers are drawn uniformly from them.

    Attributes:
        name: its name in records and statistics.
        about: a description for people.
        api: `chat`, `completions` or `generate`.
        documents: how many documents all users share; 0 gives each conversation its own.
        document: words of a document.
        question: words of each question after it.
        output: tokens to generate; an answer never ends earlier.
        turns: questions of one conversation, each with the answers before it.
        think: seconds between turns, in tenths.
        vocab: token ids to draw from, with `generate`.
        burst: requests that one user sends at once.
        sparse: `custom_params.sparse` of each request, or nothing.
    """

    name: str
    about: str
    api: str = "chat"
    documents: int = 0
    document: Range = (0, 0)
    question: Range = (8, 16)
    output: Range = (16, 16)
    turns: int = 1
    think: Range = (0, 0)
    vocab: Range = (10, 1000)
    burst: int = 1
    sparse: dict[str, Any] | None = None

    @classmethod
    def load(cls, name: str) -> Scenario:
        """Read a scenario by its name or by the path of a file.

        Raises:
            ValueError: there is no such scenario, or it has an unknown key.
        """
        path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.json")))
            raise ValueError(f"no scenario {name!r}; there are {known}, or give a path")
        content = json.loads(path.read_text())
        unknown = set(content) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"{path} has unknown keys {sorted(unknown)}")
        ranges = {k: tuple(v) for k, v in content.items() if isinstance(v, list)}
        return cls(**{**content, **ranges})


def scenario_name(name: str) -> str:
    """`type` of an argument: a name or path that `Scenario.load` takes."""
    try:
        Scenario.load(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


class Conversations:
    """Draws conversations of one scenario.

    Attributes:
        documents: the shared documents, which are the same for every user and seed.
    """

    def __init__(self, scenario: Scenario, model: str, seed: int | str) -> None:
        self.scenario, self.model = scenario, model
        self._source = random.Random(seed)
        shared = random.Random(f"documents of {scenario.name}")
        self.documents = [
            self._content(shared, scenario.document) for _ in range(scenario.documents)
        ]

    def _content(self, source: random.Random, length: Range) -> Any:
        count = source.randint(*length)
        if self.scenario.api == "generate":
            return [source.randint(*self.scenario.vocab) for _ in range(count)]
        return " ".join(source.choice(_WORDS) for _ in range(count))

    def requests(self, answer: list[str]) -> Iterator[dict[str, Any]]:
        """Bodies of one conversation; the caller appends each answer to `answer`."""
        s, source = self.scenario, self._source
        if self.documents:
            document = source.choice(self.documents)
        else:
            document = self._content(source, s.document)
        if s.api == "generate":
            prompt = document + self._content(source, s.question)
            yield self._generate(prompt, source.randint(*s.output))
            return
        if s.api == "completions":
            prompt = f"{document} {self._content(source, s.question)}".strip()
            yield self._openai({"prompt": prompt}, source.randint(*s.output))
            return
        messages: list[dict[str, str]] = []
        for turn in range(s.turns):
            words = self._content(source, s.question)
            content = f"{document}\n\n{words}?" if turn == 0 and document else f"{words}?"
            messages.append({"role": "user", "content": content})
            yield self._openai({"messages": list(messages)}, source.randint(*s.output))
            messages.append({"role": "assistant", "content": answer[-1] if answer else ""})

    def _openai(self, prompt: dict[str, Any], output: int) -> dict[str, Any]:
        body = {"model": self.model, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        return body | prompt | self._params()

    def _generate(self, ids: list[int], output: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
        return {"input_ids": ids, "sampling_params": sampling | self._params()}

    def _params(self) -> dict[str, Any]:
        sparse = self.scenario.sparse
        return {} if sparse is None else {"custom_params": {"sparse": sparse}}

    def think_seconds(self) -> float:
        """Seconds before the next turn."""
        return self._source.randint(*self.scenario.think) / 10
