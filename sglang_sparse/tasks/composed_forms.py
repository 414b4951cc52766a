# SPDX-License-Identifier: Apache-2.0
"""Sentences and questions that are put together from parts; training alone sees them.

Their other nouns keep a value from being what stands behind the only article.
"""

from __future__ import annotations

from itertools import product

_WHEN = ("", "At nine ", "By chance ", "On the way home ", "Just before dinner ", "Once more ")
_DEEDS = (
    "{s} waited",
    "{s} met a friend",
    "{s} lost a coin",
    "{s} took a nap",
    "{s} wrote a letter",
    "{s} sang a song",
    "{s} looked for a seat",
    "somebody noticed {s}",
    "we ran into {s}",
    "a cousin spoke to {s}",
    "they took a picture of {s}",
    "nobody expected {s}",
)
_SPOTS = (
    "on the steps of {v}",
    "at the back of {v}",
    "near the gate of {v}",
    "by the windows of {v}",
    "at the far end of {v}",
    "inside {v}",
    "in front of {v}",
    "on the upper floor of {v}",
    "behind the wall of {v}",
)
_OPINIONS = (
    "{p} chose {v}",
    "{p} wants {v}",
    "{p} named {v}",
    "{p} asked for {v}",
    "{p} spoke up for {v}",
    "{v} is what {p} wrote",
    "the slip of {p} says {v}",
    "{p} raised a hand for {v}",
    "it is {v} that {p} picked",
)
_MATTERS = (
    "when it came to {s}",
    "in the matter of {s}",
    "for {s}, without a second thought",
    "as the home of {s}",
    "for {s} in the end",
    "if the question is {s}",
)
_PLACES = ("places", "rooms", "houses", "spots", "buildings")
_SEEN = (
    "Which {n} has {{s}} been inside?",
    "Which {n} had {{s}} as a guest?",
    "What {n} did {{s}} see?",
    "Which {n} were on the way of {{s}}?",
    "Name the {n} of {{s}}.",
    "Say all the {n} where {{s}} was.",
    "Give me a list of the {n} with {{s}}.",
    "In how many {n}, and in which, was {{s}}?",
)
_TOWNS = ("town", "place", "candidate")
_LEADERS = (
    "Which {n} do most people name for {{s}}?",
    "What {n} has the largest share for {{s}}?",
    "Tell me which {n} wins {{s}}.",
    "Name the {n} that most want for {{s}}.",
    "By a majority, which {n} gets {{s}}?",
    "After the count, which {n} has {{s}}?",
)

VISITS = tuple(f"{when}{deed} {spot}." for when, deed, spot in product(_WHEN, _DEEDS, _SPOTS))[::7]
VISIT_QUESTIONS = tuple(form.format(n=noun) for form, noun in product(_SEEN, _PLACES))
VOTES = tuple(f"{opinion} {matter}." for opinion, matter in product(_OPINIONS, _MATTERS))
VOTE_QUESTIONS = tuple(form.format(n=noun) for form, noun in product(_LEADERS, _TOWNS))
