# SPDX-License-Identifier: Apache-2.0
"""The reading tasks: their answers follow from the text, and nothing of a split is in the other."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import cast, get_args

import numpy as np
import pytest

from sglang_sparse.tasks import (
    READING_TASKS,
    SPLITS,
    FileEncoder,
    Sample,
    Split,
    TaskSuite,
    is_exact,
    recall,
)
from sglang_sparse.tasks.aggregation import VISIT_QUESTIONS, VISITS, VOTE_QUESTIONS, VOTES
from sglang_sparse.tasks.dialogues import CORRECTIONS, FOLLOW_UPS
from sglang_sparse.tasks.entities import entities
from sglang_sparse.tasks.relations import RELATIONS, WRAPPINGS, Relation, statement
from sglang_sparse.tasks.scoring import WORD_TASKS
from sglang_sparse.tasks.templates import Forms, blurred
from sglang_sparse.tasks.training_words import WORDS
from sglang_sparse.tasks.vocabulary import Kind, known_words, names, pool
from sglang_sparse.tasks.words import PARTLY_HELD_OUT

MODEL = Path(__file__).parents[2] / "configs" / "reference" / "model"
ALL_FORMS = [
    *(f for r in RELATIONS.values() for f in (r.statements, r.questions, r.phrase)),
    *(VISITS, VISIT_QUESTIONS, VOTES, VOTE_QUESTIONS, CORRECTIONS, FOLLOW_UPS),
]


@pytest.fixture(scope="module")
def suites() -> dict[Split, TaskSuite]:
    encoder = FileEncoder(MODEL)
    return {split: TaskSuite(encoder, split) for split in SPLITS}


# One word behind an article, or a name of one or two words, perhaps behind a title.
_PHRASE = r"(?:(?:the|an?) )?[\w-]+(?:\.? (?-i:[A-Z])\w+)?"


@cache
def pattern(template: str, hole: str = ".+") -> re.Pattern[str]:
    """What a filled-in template matches; its holes are groups, but for nouns beside the value."""
    parts = re.split(r"\{(\w)\}", template)
    holes = [(r"\w+" if p == "d" else f"(?P<{p}>{hole})") if i % 2 else re.escape(p)
             for i, p in enumerate(parts)]  # fmt: skip
    return re.compile("".join(holes), re.IGNORECASE)


def bare(phrase: str) -> str:
    return re.sub(r"^(the|a) ", "", phrase, flags=re.IGNORECASE).lower()


def needles(suite: TaskSuite, sample: Sample) -> list[str]:
    """The needles in the order of the text."""
    spans = sorted(sample.needle_spans)
    return [suite.encoder.decode(sample.prompt_ids[a:b]).strip() for a, b in spans]


def facts(texts: list[str], forms: Forms) -> list[dict[str, str]]:
    """What each text says that is one of ``forms``, of either split."""
    found = []
    for text in texts:
        for template in (*forms.train, *forms.heldout):
            match = pattern(template, _PHRASE).fullmatch(text)
            if match:
                found.append({k: bare(v) for k, v in match.groupdict().items()})
                break
    return found


def relation_of(sample: Sample) -> Relation:
    """The relation whose plain sentence ends the answer."""
    last = re.split(r"(?<=\.) ", sample.answer)[-1]
    return next(r for r in RELATIONS.values() if pattern(r.plain).fullmatch(last))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", READING_TASKS)
def test_short_prompts_hold_all_that_is_asked(
    suites: dict[Split, TaskSuite], task: str, split: Split
) -> None:
    suite = suites[split]
    for length in (256, 333, 700):
        for sample in suite.samples(task, length, 12, seed=2):
            assert len(sample.prompt_ids) + len(sample.answer_ids) <= length
            assert suite.encoder.encode(sample.prompt) == sample.prompt_ids
            assert is_exact(sample, sample.answer)
            assert recall(sample, sample.answer) == 1.0


def test_words_names_and_templates_of_the_splits_are_disjoint() -> None:
    for kind in get_args(Kind):
        assert not set(pool(kind, "train")) & set(pool(kind, "heldout"))
        assert len(pool(kind, "heldout")) >= 15
    for train, held in zip(*map(names, ("train", "heldout")), strict=True):
        assert held
        assert not set(train) & set(held)
    for forms in (*ALL_FORMS, WRAPPINGS):
        assert forms.heldout
        assert not {*forms.train, *forms.wide, *forms.plain} & set(forms.heldout)
        assert forms.wide
        assert not set(forms.train) & {*forms.wide, *forms.plain}


def test_templates_name_no_value() -> None:
    parts = (*ALL_FORMS, WRAPPINGS)
    told = [form for forms in parts for form in (*forms.train, *forms.heldout, *forms.wide)]
    told += [line for r in RELATIONS.values() for line in (r.plain, r.question)]
    plain = [form for forms in parts for form in forms.plain]
    words = {*re.findall("[a-z]+", " ".join(told).lower())}
    kinds: tuple[Kind, ...] = ("place", "thing", "animal", "job", "town", "river")
    for kind in kinds:
        assert not {*words, *re.findall("[a-z]+", " ".join(plain).lower())} & known_words(kind)
        assert not words & set(WORDS.get(kind, "").split())


@cache
def heldout_parts() -> set[str]:
    """What templates of the held-out split alone say between names and values."""
    trained = " ".join(form for forms in ALL_FORMS for form in forms.train)
    trained += " ".join(line for r in RELATIONS.values() for line in (r.plain, r.question))
    told = [part for forms in ALL_FORMS for form in forms.heldout for part in form.split("{")]
    return {part[2:] for part in told if len(part) > 12 and part[2:] not in trained}


@pytest.mark.parametrize("task", ["sentences", "collect", "tally", "dialogue"])
def test_words_alone_or_forms_alone_may_be_held_out(task: str) -> None:
    def said(split: Split) -> str:
        problems = [READING_TASKS[task](np.random.default_rng(s), split, 1024) for s in range(12)]
        return " ".join(n.text for problem in problems for n in problem.needles)

    first, last = (set(words) for words in names("heldout"))
    kinds: tuple[Kind, ...] = ("place", "thing", "animal", "job", "town", "river")
    held = first | last | {word for kind in kinds for word in pool(kind, "heldout")}
    for split, words, forms in (
        ("heldout", True, True), ("heldout_words", True, False), ("heldout_forms", False, True),
    ):  # fmt: skip
        text = said(cast(Split, split))
        assert bool(held & set(re.findall(r"\w+", text))) == words
        assert any(part in text for part in heldout_parts()) == forms
    prompts = {split: TaskSuite(FileEncoder(MODEL), split).sample(task, 512) for split in
               ("heldout", *PARTLY_HELD_OUT)}  # fmt: skip
    assert len({sample.prompt for sample in prompts.values()}) == 3


@pytest.mark.parametrize("task", [t for t in READING_TASKS if t not in WORD_TASKS])
def test_wide_problems_have_words_and_sentences_that_no_split_has(task: str) -> None:
    """They are for training; the two splits stay as they are."""
    text = ""
    for seed in range(8):
        problem = READING_TASKS[task](np.random.default_rng(seed), "wide", 2048)
        text += " ".join([*(n.text for n in problem.needles), problem.questions[0].prompt])
    words = set(re.findall("[a-z]+", text.lower()))
    known = {w.lower() for split in SPLITS for part in names(split) for w in part}
    for kind in get_args(Kind):
        known |= known_words(kind)
    assert words & ({word for listed in WORDS.values() for word in listed.split()} - known)


def test_people_of_the_wide_split_have_full_names_first_names_or_titles() -> None:
    """In a vote they have full names, since towns have one."""
    drawn = [entities(np.random.default_rng(seed), "wide", "person", 3) for seed in range(60)]
    kinds = {(len(one.split()), "." in one.split()[0]) for people in drawn for one in people}
    assert {(2, False), (1, False), (2, True)} <= kinds
    assert all(len(set(people)) == 3 for people in drawn)
    for split in SPLITS:
        named = [entities(np.random.default_rng(seed), split, "person", 2) for seed in range(20)]
        assert all(len(one.split()) == 2 and "." not in one for pair in named for one in pair)
    votes = [READING_TASKS["tally"](np.random.default_rng(seed), "wide", 512) for seed in range(20)]
    voters = [needle.parts[1] for vote in votes for needle in vote.needles if needle.parts]
    assert voters
    assert all(len(voter.split()) == 2 and "." not in voter for voter in voters)


def test_nouns_stand_beside_values_in_sentences_of_the_wide_split_alone() -> None:
    """No hole is left in a sentence, and the noun in it differs from one to the next."""
    told = [
        statement(np.random.default_rng(seed), "wide", RELATIONS["stands"].statements)
        for seed in range(200)
    ]
    assert all(set(re.findall(r"\{(\w)\}", one)) == {"s", "v"} for one in told)
    assert len(set(told)) > 150
    for forms in (*ALL_FORMS, WRAPPINGS):
        assert not any("{d}" in form for form in (*forms.train, *forms.heldout))


def test_blurred_templates_keep_what_is_filled_in() -> None:
    template = "In which town, if any, does {s} live with {v}?"
    drawn = [blurred(np.random.default_rng(seed), template, 0.8) for seed in range(400)]
    for one in drawn:
        assert [part for part in one.split() if "{" in part] == ["{s}", "{v}?"]
    assert 180 < drawn.count(template) < 300
    changed = [one.split() for one in drawn if one != template]
    assert {len(words) - len(template.split()) for words in changed} >= {-2, -1, 0, 1, 2}


@pytest.mark.parametrize("task", READING_TASKS)
def test_held_out_prompts_use_no_sentence_or_form_of_training(
    suites: dict[Split, TaskSuite], task: str
) -> None:
    """What training's templates match is none of the needles and questions."""
    suite = suites["heldout"]
    texts: list[str] = []
    for sample in suite.samples(task, 1024, 10, seed=4):
        texts += [*needles(suite, sample), sample.content.rsplit("\n\n", 1)[1]]
    for forms in ALL_FORMS:
        for template in (*forms.train, *forms.wide):
            if "}" in template[3:-4]:  # "{a} and {b}" would match anything
                match = pattern(template, _PHRASE if "{v}" in template else ".+").fullmatch
                hits = [t for t in texts if match(t)]
                assert not hits, (template, hits)


def test_similar_keys_share_two_words_with_others(suites: dict[Split, TaskSuite]) -> None:
    counts = set()
    for length in (512, 1024, 2048, 4096, 16384):
        sample = suites["heldout"].sample("similar_keys", length, seed=1)
        found = facts(
            needles(suites["heldout"], sample), Forms(("The magic number for {s} is {v}.",), ())
        )
        keys = [set(f["s"].split("-")) for f in found]
        assert len({frozenset(k) for k in keys}) == len(keys)
        for key in keys:
            assert sum(len(key & other) == 2 for other in keys) >= 3
        counts.add(len(keys))
    assert {8, 64} <= counts


@pytest.mark.parametrize("task", ["sentences", "forms"])
def test_the_value_stands_in_the_one_sentence_about_its_subject(
    suites: dict[Split, TaskSuite], task: str
) -> None:
    for sample in suites["heldout"].samples(task, 2048, 20, seed=1):
        relation = relation_of(sample)
        forms = relation.statements if task == "sentences" else Forms((relation.plain,), ())
        found = facts(needles(suites["heldout"], sample), forms)
        assert len(found) == 12
        match = pattern(relation.plain).fullmatch(sample.answer)
        assert match
        stated = [f["v"] for f in found if f["s"] == bare(match["s"])]
        assert stated == [sample.values[0].lower()]


@pytest.mark.parametrize("split", SPLITS)
def test_joined_facts_lead_from_the_subject_to_the_value(
    suites: dict[Split, TaskSuite], split: Split
) -> None:
    hops = Counter[int]()
    for sample in suites[split].samples("joined", 2048, 30, seed=1):
        texts = needles(suites[split], sample)
        sentences = re.split(r"(?<=\.) ", sample.answer)
        hops[len(sentences)] += 1
        subject = value = ""
        for sentence in sentences:
            relation, match = next(
                (r, m) for r in RELATIONS.values() if (m := pattern(r.plain).fullmatch(sentence))
            )
            assert value in ("", bare(match["s"]))
            subject = bare(match["s"])
            (value,) = [f["v"] for f in facts(texts, relation.statements) if f["s"] == subject]
        assert value == sample.values[0].lower()
        first = pattern(RELATIONS["mayor"].plain).fullmatch(sentences[0])
        if first:  # who is asked for stands in no sentence with the value
            assert not any(first["s"] in t and value in t.lower() for t in texts)
    assert set(hops) == {2, 3}


def test_collected_places_are_all_that_the_text_has_in_its_order(
    suites: dict[Split, TaskSuite],
) -> None:
    for sample in suites["heldout"].samples("collect", 4096, 20, seed=1):
        found = facts(needles(suites["heldout"], sample), VISITS)
        said = re.findall(r"(\w+ \w+) was in the (\w+)\.", sample.answer)
        told = [f"{i}. {s} was in the {v}." for i, (s, v) in enumerate(said, 1)]
        assert " ".join(told) == sample.answer
        (person,) = {s.lower() for s, _ in said}
        assert tuple(v for _, v in said) == sample.values
        assert tuple(f["v"] for f in found if f["s"] == person) == sample.values
        assert len({f["s"] for f in found}) == 3
        assert not is_exact(sample, sample.answer.replace(sample.values[0], "nothing"))


@pytest.mark.parametrize("length", [512, 4096, 32768])
def test_the_most_votes_win_and_no_few_votes_tell(
    suites: dict[Split, TaskSuite], length: int
) -> None:
    for sample in suites["heldout"].samples("tally", length, 5, seed=1):
        found = facts(needles(suites["heldout"], sample), VOTES)
        assert len(found) == len(sample.needle_spans)
        topics = [bare(t) for t in re.findall(r"votes for (.+?) went", sample.answer)]
        assert len(topics) == 2
        for topic, winner in zip(topics, sample.values, strict=True):
            votes = Counter(f["v"] for f in found if f["s"] == topic)
            (first, most), (_, second), *_ = votes.most_common()
            assert first == winner.lower()
            assert second < most <= max(2 * second, second + 2)


def test_the_last_statement_counts_in_a_dialogue(suites: dict[Split, TaskSuite]) -> None:
    corrected = short = 0
    for sample in suites["heldout"].samples("dialogue", 4096, 40, seed=1):
        relation = relation_of(sample)
        plain, texts = [], needles(suites["heldout"], sample)
        for text in texts:
            frames = [pattern(f).fullmatch(text) for f in CORRECTIONS.heldout]
            plain.append(next((m["f"] for m in frames if m), text))
        match = pattern(relation.plain).fullmatch(sample.answer)
        assert match
        stated = [f["v"] for f in facts(plain, relation.statements) if f["s"] == bare(match["s"])]
        assert stated[-1] == sample.values[0].lower()
        corrected += len(stated) > 1
        question = sample.content.rsplit("\n\n", 1)[1]
        short += any(pattern(f).fullmatch(question) is not None for f in FOLLOW_UPS.heldout)
    assert corrected > 5
    assert short > 10


def test_dialogues_are_chats_whose_answers_were_true_when_given(
    suites: dict[Split, TaskSuite],
) -> None:
    turns = set()
    for sample in suites["train"].samples("dialogue", 4096, 20, seed=3):
        roles = [m["role"] for m in sample.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        turns.add(len(roles) // 2)
        written = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in sample.messages)
        assert sample.prompt == f"<|bos|>{written}<|assistant|>"
        relation = relation_of(sample)
        for number, message in enumerate(sample.messages):
            if message["role"] == "assistant":
                match = pattern(relation.plain).fullmatch(message["content"])
                assert match
                before = " ".join(m["content"] for m in sample.messages[:number])
                subject = re.escape(match["s"]) if match else ""
                last = [
                    sentence
                    for sentence in re.split(r"(?<=[.:?])\s+|\n", before)
                    if re.search(subject, sentence, re.IGNORECASE) and not sentence.endswith("?")
                ]
                assert any(bare(match["v"]) in s.lower() for s in last)
    assert turns == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("reply", "exact"),
    [
        ("{answer}", True),
        ("It is {value}, I think: {value}.", True),
        ("{VALUE}", True),
        ("It is {value} or {other}.", False),
        ("{other}", False),
        ("I do not know.", False),
    ],
)
def test_a_reply_states_the_words_of_the_kind_that_is_asked_for(
    suites: dict[Split, TaskSuite], reply: str, exact: bool
) -> None:
    sample = next(
        s
        for s in suites["heldout"].samples("sentences", 512, 40, seed=1)
        if s.value_kind == "animal"
    )
    other = next(w for w in pool("animal", "train") if w not in sample.content)
    value = sample.values[0]
    said = reply.format(answer=sample.answer, value=value, VALUE=value.upper(), other=other)
    assert is_exact(sample, said) is exact


def test_a_depth_is_refused_where_the_order_of_needles_counts(
    suites: dict[Split, TaskSuite],
) -> None:
    sample = suites["heldout"].sample("sentences", 4096, depth=0.5)
    assert abs(sample.needle_spans[0][0] / 4096 - 0.5) < 0.05
    for task in ("dialogue", "collect"):
        with pytest.raises(ValueError, match="stand in an order"):
            suites["heldout"].sample(task, 4096, depth=0.5)
