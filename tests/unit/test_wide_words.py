# SPDX-License-Identifier: Apache-2.0
"""Words of the wide split are new each time, and none is held out; how it tells and asks."""

import numpy as np
import pytest

from sglang_sparse.tasks import Split
from sglang_sparse.tasks.entities import people
from sglang_sparse.tasks.relations import RELATIONS, statement, wrapped
from sglang_sparse.tasks.templates import exchanged
from sglang_sparse.tasks.training_words import WORDS
from sglang_sparse.tasks.vocabulary import held_out, names, pool
from sglang_sparse.tasks.wide_words import WIDE, WideWords


@pytest.mark.parametrize("kind", ["first name", "surname", "town", "river", "place", "job"])
def test_wide_words_are_new_each_time_and_never_held_out(kind: str) -> None:
    wide, rng = WideWords(), np.random.default_rng(1)
    first, second = wide.draw(rng, kind, 40), wide.draw(rng, kind, 40)
    assert len(set(first)) == len(set(second)) == 40
    assert len({*first} - {*second}) > 20
    held = names("heldout")[kind == "surname"] if "name" in kind else pool(kind, "heldout")
    many = {*wide.draw(rng, kind, 400)}
    assert not many & set(held)
    assert not any(held_out(word) for word in many)
    assert {word[0].isupper() for word in many} == {kind not in ("place", "job")}


def test_short_words_of_a_list_are_drawn() -> None:
    wide, rng = WideWords(), np.random.default_rng(4)
    short = {word for word in pool("thing", "train") if len(word) == 3}
    assert short
    assert short <= {word for _ in range(600) for word in wide.draw(rng, "thing", 9)}


@pytest.mark.parametrize("kind", ["surname", "town", "place"])
def test_many_draws_have_no_listed_word_and_many_have_words_that_begin_alike(kind: str) -> None:
    wide, rng = WideWords(), np.random.default_rng(3)
    wide.read("So Ottilie said. " + " ".join(f"A {noun}, then." for noun in ("tarn", "doorway")))
    listed = set(names("train")[1] if kind == "surname" else pool(kind, "train"))
    listed |= set(WORDS.get(kind, "").split())
    draws = [wide.draw(rng, kind, 6) for _ in range(300)]
    without = sum(not listed & set(words) for words in draws)
    assert 150 < without < 220  # of 300: six of ten, and some by chance
    begun = sum(len({word[:3] for word in words}) < 5 for words in draws)
    assert 120 < begun < 190
    assert all(word[1:].islower() for words in draws for word in words)
    assert all(len(set(words)) == 6 and not any(map(held_out, words)) for words in draws)


def test_half_of_the_draws_of_few_people_have_two_first_names() -> None:
    rng = np.random.default_rng(8)

    def firsts(count: int) -> list[int]:
        drawn = [people(rng, "wide", count) for _ in range(200)]
        assert all(len(set(named)) == count for named in drawn)
        return [len({name.split()[0] for name in named}) for named in drawn]

    assert 80 < sum(number == 2 for number in firsts(6)) < 140
    assert min(firsts(40)) > 2
    assert all(firsts(1))


@pytest.mark.parametrize("name", RELATIONS)
def test_values_stand_first_in_more_statements_of_training(name: str) -> None:
    forms, rng = RELATIONS[name].statements, np.random.default_rng(4)

    def share(told: list[str]) -> float:
        return sum(text.index("{v}") < text.index("{s}") for text in told) / len(told)

    usual = share([forms.told(rng, "wide") for _ in range(2400)])
    found = share([statement(rng, "wide", forms) for _ in range(2400)])
    right = 0.75 * usual + 0.25 * (1 - (1 - usual) ** 16)
    # Four deviations: of a share 0.0102 at most, of what follows from one 0.0125.
    assert found == pytest.approx(right, abs=0.065)
    assert found > usual


@pytest.mark.parametrize(("split", "share"), [("heldout", 0.1), ("train", 0.1), ("wide", 0.25)])
def test_some_questions_have_no_capitals(split: Split, share: float) -> None:
    rng, question = np.random.default_rng(5), "Where does Ada Holt live?"
    low = [wrapped(rng, split, question) == "where does ada holt live" for _ in range(1000)]
    assert sum(low) == pytest.approx(1000 * share, abs=4 * (1000 * share * (1 - share)) ** 0.5)


def test_names_and_nouns_of_a_text_are_drawn_but_for_those_held_out() -> None:
    wide, rng = WideWords(), np.random.default_rng(2)
    # Words that CRC-32 holds out: Silke, pothole. A kiosk is a place, however often it is named.
    # A doorway is in sentences of training.
    wide.read(
        "Then, as Ottilie said, Silke saw a tarn in the gully, a doorway, and a pothole. The "
        "quick fox. The court of a court is the court, and a kiosk is a kiosk in the kiosk."
    )
    read = {*wide.draw(rng, "surname", 90)}
    assert read & {"Ottilie", "Silke", "So"} == {"Ottilie"}
    nouns = {*wide.draw(rng, "thing", 300)}
    unread = {"doorway", "pothole", "quick", "court"}
    assert nouns & {"tarn", "gully", *unread} == {"tarn", "gully"}
    beside = {wide.beside(rng) for _ in range(300)}
    assert "tarn" in beside
    no_values = {wide.no_value(rng) for _ in range(30_000)}
    assert no_values >= {"court", "doorway"}
    assert not no_values & {"tarn", "gully", "kiosk"}
    assert "pothole" not in beside | no_values
    assert wide.names_no_value("The court of reason, and the doorway.")
    assert not wide.names_no_value("The court and the tarn.")
    assert not wide.names_no_value("The court of Ottilie.")


def test_nouns_of_a_few_sentences_are_values_and_those_of_many_are_none() -> None:
    wide, rng = WideWords(), np.random.default_rng(6)
    drawn = [word for _ in range(400) for word in wide.draw(rng, "animal", 6)]
    told = [word for word in drawn if wide.names_no_value(f"See the {word}.")]
    assert 0.15 < len(told) / len(drawn) < 0.35
    assert len({*told}) > 300
    assert not {"pet", "owner", "animal", "river", "ownership"} & {*drawn}


def test_exchanged_sentences_get_other_nouns_that_are_no_values() -> None:
    template = "The clerk in {v} gave a form, then an old map, to {s} and her friend at the door."
    drawn = {exchanged(np.random.default_rng(seed), template) for seed in range(2000)}
    assert template in drawn
    assert len(drawn) > 1000
    wide = WIDE.names_no_value
    for text in drawn:
        was, now = template.split(), text.split()
        changed = [i for i, (a, b) in enumerate(zip(was, now, strict=True)) if a != b]
        # What stands behind an article or a pronoun, whatever it is; the holes stay.
        assert {*changed} <= {1, 6, 9, 15, 18}
        assert wide(" ".join(f"the {now[i].rstrip(',.')}" for i in changed) + ".")
