# SPDX-License-Identifier: Apache-2.0
"""Pairs of requests on one prefix: what each of them selects, step by step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sglang_sparse.research.decode import PAGE, Decoder
from sglang_sparse.research.host_frames import Block, Recording
from sglang_sparse.research.model import ReferenceModel
from sglang_sparse.research.policies import Cache, Policy, pooled_scores
from sglang_sparse.tasks import TASKS, Question, TaskSuite
from sglang_sparse.tasks.encoding import ASSISTANT, END, USER

STEPS = 10
# Answers to the questions of the first two begin alike, those of the others with a name.
CONTEXTS = ("multi_key", "multi_value", "sentences", "joined")
SCENES = ("same question", "other question, same opening", "other question", "next turn")

Head = tuple[int, int]  # layer, KV head


@dataclass(frozen=True)
class Request:
    """A prompt, and its right answer with the end of the turn."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Context:
    """A document with two questions, each a request of its own, and both as turns of one chat."""

    first: Request
    other: Request
    turn: Request

    @property
    def scenes(self) -> dict[str, Request]:
        """The requests that come back, by scene."""
        same, alike, apart, turn = SCENES
        opening = alike if self.other.answer[0] == self.first.answer[0] else apart
        return {same: self.first, opening: self.other, turn: self.turn}

    def shared(self, request: Request) -> int:
        """Tokens of the first request's KV that another one finds, in whole pages."""
        before = self.first.prompt + self.first.answer[:-1]  # the end of a turn is not decoded
        same = 0
        for mine, its in zip(request.prompt[:-1], before, strict=False):
            if mine != its:
                break
            same += 1
        return same // PAGE * PAGE


def contexts(
    suite: TaskSuite, tasks: Sequence[str], length: int, count: int, seed: int
) -> Iterator[Context]:
    """``count`` contexts of each task, with their first two questions.

    Raises:
        ValueError: documents of ``length`` tokens have one question alone.
    """
    encode = suite.encoder.encode

    def tail(question: Question) -> list[int]:
        return encode(f"\n\n{question.prompt}{END}{ASSISTANT}")

    for task in tasks:
        for index in range(count):
            sample = suite.sample(task, length, seed, index)
            problem = TASKS[task](suite.rng(task, length, seed, index), suite.split, length)
            if len(problem.questions) < 2:
                raise ValueError(f"{task} has one question at {length} tokens: take 1,024 or more")
            asked, other = problem.questions[:2]
            document = sample.prompt_ids[: -len(tail(asked))]
            if document + tail(asked) != sample.prompt_ids:
                raise ValueError(f"a question of {task} is not encoded by itself")
            answer = encode(other.answer + END)
            chat = encode(USER + other.prompt + END + ASSISTANT)
            yield Context(
                Request(sample.prompt_ids, sample.answer_ids),
                Request(document + tail(other), answer),
                Request(sample.prompt_ids + sample.answer_ids + chat, answer),
            )


@dataclass
class Run:
    """What one request selected under a policy.

    Step 0 is that of the last prompt token, which a server prefills; step 1 is the first that it
    decodes.

    Attributes:
        recording: tokens attended to by step, layer and KV head.
        scores: by step, then by layer: the scores that its lists follow from, float32 ``[KV heads,
            units]``. Of the first steps alone, and of layers that score.
    """

    policy: Policy
    recording: Recording
    scores: list[dict[int, Tensor]] = field(default_factory=list)

    @cached_property
    def last(self) -> int:
        """The last step."""
        return len(self.recording.steps) - 1

    def units(self, step: int, head: Head, shared: int | None = None) -> Tensor:
        """Units that a KV head attended to, ascending; of the first ``shared`` tokens, if given."""
        positions = self.recording.steps[step][1][head]
        if shared is not None:
            positions = positions[positions < shared]
        return (positions // self.policy.unit).unique()

    def blocks(self, step: int, block: int, shared: int | None = None) -> list[list[Block]]:
        """Blocks that each layer attended to, as :meth:`Recording.touched` has them.

        With ``shared`` they are what is left of them for a request that shares so many tokens.
        """
        length, lists = self.recording.steps[step]
        if shared is None:
            return next(Recording([(length, lists)], self.recording.recent).touched(block))
        kept = {head: positions[positions < shared] for head, positions in lists.items()}
        return next(Recording([(length, kept)], 0).touched(block))

    def always(self, step: int) -> Tensor:
        """Units that a step attends to whatever their scores, ascending."""
        length, policy = self.recording.steps[step][0], self.policy
        ends = torch.arange(min(policy.sink, length)), torch.arange(length - policy.recent, length)
        return (torch.cat(ends) // policy.unit).unique()

    def depths(self, step: int) -> dict[Head, int]:
        """Microbatches that each KV head took up to PSA's stop."""
        always, size = len(self.always(step)), self.policy.microbatch // self.policy.unit
        return {
            head: -(-(len(self.units(step, head)) - always) // size)
            for head in self.recording.steps[step][1]
        }


def record(decoder: Decoder, request: Request, policy: Policy) -> Run:
    """Decode a request's answer behind its prompt, whose last token the decoder lacks."""
    length, steps = int(decoder.prompt_lengths), []
    found: dict[int, Tensor] = {}
    scores: list[dict[int, Tensor]] = []

    def watch(layer: int, q: Tensor, cache: Cache, lengths: Tensor) -> None:
        if not policy.epsilon and (not policy.anchors or layer in policy.anchors):
            found[layer] = pooled_scores(policy, q, cache, lengths)[0].float().cpu()

    given = [request.prompt[-1], *request.answer[:-1]]
    decoder.watch = watch
    for number, masks in enumerate(decoder.replay(policy, torch.tensor([given]))):
        length += 1
        lists = {
            (layer, head): row[:length].nonzero().flatten().int().cpu()
            for layer, mask in masks.items()
            for head, row in enumerate(mask[0])
        }
        steps.append((length, lists))
        if number <= STEPS:
            scores.append({layer: rows for layer, rows in found.items() if layer in masks})
        decoder.watch = watch if number < STEPS else None  # later steps are not searched
        found.clear()
    decoder.watch = None
    return Run(policy, Recording(steps, policy.recent), scores)


@dataclass(frozen=True)
class Return:
    """A request that comes back to a prefix.

    Attributes:
        scene: one of :data:`SCENES`.
        shared: tokens of the prefix.
        first: the request that decoded from the prefix last.
        second: the one that comes back.
        stranger: one that shared nothing and had the request slot before; None if there is none.
    """

    scene: str
    shared: int
    first: Run
    second: Run
    stranger: Run | None


def play(
    model: ReferenceModel, given: Sequence[Context], policies: dict[str, Policy]
) -> dict[str, list[Return]]:
    """Decode all requests under each policy; returns what came back, by the policy's name."""
    runs: list[dict[str, dict[str, Run]]] = []
    for context in given:
        by_policy: dict[str, dict[str, Run]] = {name: {} for name in policies}
        for scene, request in context.scenes.items():
            decoder = Decoder(model, [request.prompt[:-1]], len(request.answer) + 1)
            for name, policy in policies.items():
                by_policy[name][scene] = record(decoder, request, policy)
        runs.append(by_policy)
    result: dict[str, list[Return]] = {name: [] for name in policies}
    for number, context in enumerate(given):
        for name in policies:
            own, before = runs[number][name], runs[number - 1][name]
            stranger = before[SCENES[0]] if len(given) > 1 else None
            for scene, request in context.scenes.items():
                shared = context.shared(request)
                result[name].append(Return(scene, shared, own[SCENES[0]], own[scene], stranger))
    return result
