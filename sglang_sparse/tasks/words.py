# SPDX-License-Identifier: Apache-2.0
"""Names and values that tasks are made of, split once into a training and a held-out part.

A string belongs to the held-out split when its CRC-32 is divisible by eight. The two splits share
no key, no variable name and no value, so a model cannot have seen a held-out answer while training.
"""

import zlib
from functools import lru_cache
from itertools import product
from typing import Literal

# "wide" is the training split with words, sentences and forms of a question beside it that training
# alone sees. Of the last two, words alone, or sentences and forms alone, are held out; their filler
# is. They say what a model fails on.
Split = Literal["train", "heldout", "wide", "heldout_words", "heldout_forms"]

SPLITS: tuple[Split, ...] = ("train", "heldout")
PARTLY_HELD_OUT: tuple[Split, ...] = ("heldout_words", "heldout_forms")

ADJECTIVES: tuple[str, ...] = tuple(
    """able amber ancient bitter blue bold brave bright calm clever cold crisp curious daring
    dark eager early fancy fierce gentle giant golden grand green happy heavy hollow humble
    icy jolly keen kind late lively lonely loud lucky mellow misty modest narrow noble old
    orange pale plain polite proud purple quick quiet rapid red rough round royal rusty
    salty sharp shiny silent silver sleepy smooth soft solid sour spare steep stormy sweet
    swift tall tidy tiny vivid warm white wide wild wise young""".split()  # noqa: SIM905
)
NOUNS: tuple[str, ...] = tuple(
    """acorn anchor apple arrow badger basket beaver bell bottle bridge bucket butter button
    cabin camel candle canyon castle cherry cloud comet copper coral cricket dolphin dragon
    eagle ember falcon feather forest fox garden ginger glacier goose hammer harbor hawk
    hedge helmet heron island ivory jacket kettle ladder lantern lemon lizard magnet maple
    marble meadow mirror monkey mountain needle ocean olive otter owl parrot pebble pepper
    pigeon planet pony rabbit raven river rocket saddle salmon shadow spider sparrow
    squirrel stone teapot thunder tiger tulip turtle valley violin walnut whale willow
    window wolf zebra""".split()  # noqa: SIM905
)
_CONSONANTS = "BCDFGHJKLMNPQRSTVWXZ"


def words_of(split: Split) -> Split:
    """The one of ``SPLITS`` that the words of a split belong to."""
    return "heldout" if split in ("heldout", "heldout_words") else "train"


def forms_of(split: Split) -> Split:
    """The one of ``SPLITS`` that its sentences and forms of a question belong to."""
    return "heldout" if split in ("heldout", "heldout_forms") else "train"


def in_split(text: str, split: Split) -> bool:
    """Whether ``text`` belongs to the words of ``split``."""
    return (zlib.crc32(text.encode()) % 8 == 0) == (words_of(split) == "heldout")


def check_split(split: str) -> None:
    """Raise ``ValueError`` naming the valid splits when ``split`` is not one of them."""
    allowed = (*SPLITS, *PARTLY_HELD_OUT)
    if split not in allowed:
        raise ValueError(f"unknown split {split!r}; allowed: {', '.join(allowed)}")


@lru_cache(maxsize=2)
def keys(split: Split) -> tuple[str, ...]:
    """All ``adjective-noun`` keys of a split."""
    return tuple(
        k for k in (f"{a}-{n}" for a, n in product(ADJECTIVES, NOUNS)) if in_split(k, split)
    )


@lru_cache(maxsize=2)
def variable_names(split: Split) -> tuple[str, ...]:
    """All three-consonant variable names of a split."""
    names = ("".join(letters) for letters in product(_CONSONANTS, repeat=3))
    return tuple(name for name in names if in_split(name, split))


@lru_cache(maxsize=2)
def values(split: Split) -> tuple[str, ...]:
    """All five-digit values of a split."""
    return tuple(v for v in map(str, range(10_000, 100_000)) if in_split(v, split))


@lru_cache(maxsize=2)
def list_words(split: Split) -> tuple[str, ...]:
    """Two-word compounds used by the counting tasks, e.g. ``amberfox``."""
    return tuple(
        w
        for w in (f"{a}{n}" for a, n in product(ADJECTIVES[::3], NOUNS[::3]))
        if in_split(w, split)
    )
