# SPDX-License-Identifier: Apache-2.0
"""Templates of sentences and questions by split, and those that training alone sees blurred."""

import re
from dataclasses import dataclass

import numpy as np

from sglang_sparse.tasks.wide_words import WIDE
from sglang_sparse.tasks.words import Split, forms_of

# What takes the place of words, or comes between them, in blurred questions and sentences.
_COMMON_WORDS = """
a about above across after again against ago all almost along already also although always among
an and another any anyone around ask at away back bad be because become before begin behind
believe below beside best better between big both bring but by came can case chance check child
clear close cold come consider could course cut date day deal decide deep did different do does
done door down early easy either else end enough even ever every exact explain fact fair far fast
few final find first five follow for four free friend from full gave get girl give glad go gone
good got great group half hand happen hard has have he hear help her here high him his hope hour
how however if important in indeed inside instead into it its just keep kind knew know large last
late lately later least leave left less let letter life like likely line little long look lost lot
love made main make man many matter may maybe mean meet might mind minute month more morning most
move much must my near need never new next nice night nine no none nor not note nothing now of off
often old on once one only open or order other our out over own page part past pay people perhaps
piece place please point poor present quite quick rather read ready real reason remember rest
right room round run said same saw say second see seem seen send set several shall she short
should show side simple since sit six small so some soon sort speak stand start stay step still
stop story street such sudden sum sure take talk tell ten than thank that the their them then
there these they thing think this those though three through till time to today together told too
took top toward true try turn two under until up upon us use usual very wait walk want warm was
watchful way we week well went were what when where whether which while white who whole whose why
will wish with without woman word work world would write wrong year yes yesterday yet you young
your
"""
_COMMON = _COMMON_WORDS.split()
_PLAIN_SHARE = 0.75
# Share of plain sentences that get other nouns, and share of their nouns.
_EXCHANGED, _EXCHANGED_NOUNS = 0.5, 0.7
_NOUN = re.compile(r"\b((?i:the|an?|this|that|his|her|their|our|my)) ([a-z]{3,})\b")


@dataclass(frozen=True)
class Forms:
    """Templates of one purpose, by split.

    Those of ``wide`` come beside those of ``train``, and those of ``plain`` before both: whole
    sentences.
    """

    train: tuple[str, ...]
    heldout: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()

    def asked(self, rng: np.random.Generator, split: Split) -> str:
        """One template of a question, blurred in the wide split."""
        template = self.draw(rng, split)
        return blurred(rng, template, 0.8) if split == "wide" else template

    def told(self, rng: np.random.Generator, split: Split) -> str:
        """One template of a statement; in the wide split mostly a plain one, lightly blurred."""
        if split == "wide" and self.plain and rng.random() < _PLAIN_SHARE:
            template = self.plain[int(rng.integers(len(self.plain)))]
            if rng.random() < _EXCHANGED:
                template = exchanged(rng, template)
        else:
            template = self.draw(rng, split)
        return blurred(rng, template, 0.1) if split == "wide" else template

    def draw(self, rng: np.random.Generator, split: Split) -> str:
        """One template of a split."""
        own = self.heldout if forms_of(split) == "heldout" else self.train
        if split == "wide":
            own += self.wide
        return own[int(rng.integers(len(own)))]


def exchanged(rng: np.random.Generator, template: str) -> str:
    """``template`` with most words behind an article replaced by nouns that are seldom values.

    So a value is not told from the nouns around it by having seen these in the same sentence.
    """

    def other(found: re.Match[str]) -> str:
        if rng.random() >= _EXCHANGED_NOUNS:
            return found.group()
        return f"{found[1]} {WIDE.no_value(rng)}"

    return _NOUN.sub(other, template)


def blurred(rng: np.random.Generator, template: str, most: float) -> str:
    """Half of the time ``template`` with words changed, left out or put in, up to a share of them.

    What is asked for then follows from the subject and the text alone, so that no form is learnt by
    heart. Parts of a template that are filled in stay, in their order.
    """
    if rng.random() < 0.5:
        return template
    share, words = float(rng.random()) * most, []
    for word in template.split(" "):
        dice = float(rng.random()) / share
        if "{" in word or dice > 1:
            words.append(word)
            continue
        if dice < 0.8:
            words.append(_COMMON[int(rng.integers(len(_COMMON)))])
        if dice < 0.4:
            words.append(word)
    return " ".join(words)
