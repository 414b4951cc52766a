# SPDX-License-Identifier: Apache-2.0
"""The words that the reading tasks speak of, by kind; each word belongs to one split.

A word is held out when its CRC-32 is divisible by four. So no held-out word was ever in a fact or
question of training, where :mod:`~sglang_sparse.tasks.words` holds out pairs of known words.
Sentence templates name no word of any kind, so a reply's words of a kind are the values that it
states.
"""

import zlib
from functools import cache, lru_cache
from itertools import product
from typing import Literal

from sglang_sparse.tasks.words import SPLITS, Split, values

Kind = Literal["number", "place", "thing", "animal", "job", "town", "river"]

_FIRST_NAMES = """
Ada Agnes Albert Alice Anton Arthur Astrid Bella Bruno Carla Cecil Clara Conrad Cora Daisy Dario
Dora Edgar Edith Elena Elias Emil Erna Ernest Esther Fanny Felix Flora Frida Gerda Gilbert Gloria
Greta Gustav Hanna Harold Hector Heidi Helen Henry Hilda Hugo Ida Igor Irene Iris Isaac Ivan
Jasper Jonas Judith Julia Karin Klaus Laura Leo Lina Lucas Lydia Magnus Maria Martha Milo Mona
Nadia Nelson Nina Nora Norman Olga Oscar Otto Pamela Paula Percy Petra Quentin Ralph Rosa Rufus
Ruth Selma Simon Sonia Stella Sven Tamara Theo Thelma Tobias Ursula Vera Victor Viola Walter Wanda
Wilma Yvonne Zelda
"""
_SURNAMES = """
Abbott Adler Arnold Barlow Becker Bennett Berger Brandt Burton Carver Chapman Collins Conway
Cooper Dalton Decker Doyle Draper Ebert Ellis Engel Farrow Fischer Fletcher Foster Franke Garner
Gibson Graham Grant Haas Hadley Harper Hartman Hobbs Holt Hooper Hudson Ingram Jarvis Jensen
Keller Kendall Kramer Lambert Lang Larkin Lindgren Lowell Maddox Manning Marsh Mercer Meyer Morton
Nash Neumann Nolan Norris Olsen Osborn Palmer Parker Pearce Porter Quinn Ramsey Reeves Richter
Rowland Sawyer Schmidt Seidel Sharpe Shelby Stokes Sutton Thorne Tucker Turner Vance Vogel Wagner
Walsh Warner Weaver Webster Weston Wilder Winter Wolff Wright Zeller Ziegler
"""
_CLOSED: dict[Kind, str] = {
    "place": """
abbey airport arcade attic bakery balcony ballroom barn basement brewery cathedral cellar chapel
cinema clinic cloister cottage courtyard crypt dairy depot dormitory factory farmhouse ferry forge
fortress foundry gallery garage granary greenhouse hangar harbor hospital hostel kitchen
laboratory laundry library lighthouse lobby mansion market mill monastery museum nursery
observatory orchard palace pantry parlor pavilion pharmacy pier prison quarry refinery restaurant
sawmill shed smithy stable stadium studio temple terrace theater tower tunnel vault veranda
vineyard warehouse windmill workshop zoo
""",
    "thing": """
accordion album almanac amulet anvil atlas backpack banjo barometer bicycle binoculars blanket
bracelet broom brush camera canteen chisel clarinet compass crown cup curtain dagger diary drum
easel envelope flag flute globe goblet guitar hairpin harp hourglass inkwell kite lamp lens locket
lute mandolin mattress medal microscope mitten mug napkin necklace notebook paddle parasol parcel
pendant piano pillow pipe pitcher purse quilt racket razor ribbon rug sandal spade scarf scepter
scissors shovel sickle sled spoon stamp statue stool suitcase sword tambourine telescope thermos
trophy trumpet umbrella vase violin wallet watch whistle wrench yoyo
""",
    "animal": """
bison buffalo canary cheetah chicken cobra crow dingo donkey duck falcon ferret finch gazelle
gecko gerbil giraffe goat gorilla hamster hare hippo jackal jaguar kangaroo kitten koala lamb
lemur leopard llama lobster lynx magpie mongoose moose mule newt panda panther peacock pelican
penguin pheasant poodle puma python quail raccoon rooster salamander seal skunk sloth squid swan
tapir terrier toad trout turkey vulture walrus weasel wombat yak
""",
    "job": """
banker barber beekeeper blacksmith bookbinder butcher carpenter cashier chemist clockmaker cobbler
conductor courier dancer dentist detective diplomat doctor driver drummer farmer fireman fisherman
florist gardener geologist glazier grocer guard hatter janitor jeweler judge lawyer librarian
locksmith magician mason mechanic merchant midwife miner musician nurse painter pianist pilot
plumber poet postman potter printer professor referee reporter sailor scientist sculptor secretary
shepherd singer soldier surgeon surveyor tailor teacher translator tutor waiter watchmaker welder
""",
}
_STARTS = "Bal Cor Dar Fen Gal Hel Jor Kel Lan Mor Nar Pel Ros Sel Tar Vel Wen Yor Zan"
_MIDDLES = "a e i o u al en il or um"
_ENDS: dict[Kind, str] = {
    "town": "bury dale ford gate ham mere mouth stead ton wick",
    "river": "bra dsa kka lva mna nde rka ssa tza vra",
}


def held_out(word: str) -> bool:
    """Whether a word belongs to the held-out split."""
    return zlib.crc32(word.encode()) % 4 == 0


def _part(words: list[str], split: Split) -> tuple[str, ...]:
    return tuple(word for word in words if held_out(word) == (split == "heldout"))


@cache
def pool(kind: Kind, split: Split) -> tuple[str, ...]:
    """All words of a kind in a split; numbers have five digits, towns and rivers are invented.

    What the wide split has beside those of training is drawn by
    :mod:`~sglang_sparse.tasks.wide_words`.
    """
    if kind == "number":
        return values(split)
    if kind in _CLOSED:
        return _part(_CLOSED[kind].split(), split)
    parts = product(_STARTS.split(), _MIDDLES.split(), _ENDS[kind].split())
    return _part(["".join(syllables) for syllables in parts], split)


@cache
def known_words(kind: Kind) -> frozenset[str]:
    """The words of a kind in both splits, in lower case: what scoring looks for in a reply."""
    return frozenset(word.lower() for split in SPLITS for word in pool(kind, split))


@lru_cache(maxsize=2)
def names(split: Split) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """First names and surnames of a split."""
    return _part(_FIRST_NAMES.split(), split), _part(_SURNAMES.split(), split)
