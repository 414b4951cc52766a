# SPDX-License-Identifier: Apache-2.0
"""Sentences and questions that are put together from parts; training alone sees them.

A value must not be what stands behind the only article, or behind the first one. So sentences have
other nouns beside it: ``{d}`` is one of them, drawn anew each time
(:meth:`~sglang_sparse.tasks.wide_words.WideWords.beside`). Each relation has sentences that name
the value first, and some that name the subject first.
"""

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
    "{s} left a {d}",
    "{s} bought a {d}",
    "{s} asked about the {d}",
    "a {d} was waiting for {s}",
    "the {d} came with {s}",
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
    "at the {d} of {v}",
    "in the {d} of {v}",
    "at the {d} and the {d} of {v}",
    "by a {d} in {v}",
    "in {v}, under the {d}",
    "in {v} with a {d}",
    "at {v}",
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
    "the {d} of {p} says {v}",
    "{p} told the {d} to note {v}",
    "{p} thought of the {d} and took {v}",
    "with a {d} in hand {p} called for {v}",
    "{v} pleases {p}",
    "{p} is for {v}",
)
_MATTERS = (
    "when it came to {s}",
    "in the matter of {s}",
    "for {s}, without a second thought",
    "as the home of {s}",
    "for {s} in the end",
    "if the question is {s}",
    "on the {d} about {s}",
    "as to where {s} should be",
)
_PICKS = (
    "{p} chose {v}",
    "{p} picked {v}",
    "{p} wants {v}",
    "{p} marked {v}",
    "{p} noted {v}",
    "{p} backed {v}",
    "{p} took {v}",
    "{p} said {v}",
    "{p} sent in {v}",
    "{p} settled on {v}",
    "{p} held out for {v}",
    "{p} brought up {v}",
    "{p} handed in {v}",
    "{p} crossed out all but {v}",
)
_LINKS = ("for {s}", "with {s}", "as to {s}", "over {s}", "about {s}")
_LATER = ("", " in the end", " at once", " with a {d}", " and left", " after the {d}")
# The matter before the opinion.
_TOPICS = (
    "on {s}",
    "about {s}",
    "in the vote on {s}",
    "as for {s}",
    "where {s} is concerned",
    "once {s} came up",
    "since {s} needs a home",
    "to the {d} about {s}",
    "asked by the {d} where {s} should go",
    "regarding {s} and no {d}",
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

_STAYS = (
    "{s} lives",
    "{s} has a flat",
    "{s} rents a room with a {d}",
    "{s} sleeps",
    "{s} grew old",
    "{s} built a {d} to live in",
    "{s} is at home",
    "one meets {s}, who lives there,",
    "the family of {s} stays",
    "{s} pays the rent",
    "the neighbors of {s} are all",
)
_AROUND = (
    "in {v}",
    "in the heart of {v}",
    "by the {d} of {v}",
    "down in {v}",
    "not far from the {d} of {v}",
    "in {v}, behind the {d}",
)
_HOMES = (
    "{v} is the place of {s}",
    "whoever needs {s} must ride to {v}",
    "without {s} {v} would be empty",
    "one goes to {v} to see {s}",
    "{v}, with its {d}, took in {s}",
    "the {d} of {s} is in {v}",
    "after the {d} {s} returned to {v}",
    "to reach {s} you cross the {d} to {v}",
)
_OFFICES = (
    "{v} is mayor",
    "{v} acts as mayor",
    "the mayor is {v}",
    "{v} took the seat of the mayor",
    "{v} holds the office of mayor",
    "it is {v} who was made mayor",
    "they call {v} the mayor",
    "{v} speaks as mayor",
    "{v} was chosen as mayor",
    "by the {d}, {v} became mayor",
    "the {d} has {v} for a mayor",
)
_REALMS = (
    "in {s}",
    "over in {s}",
    "for all of {s}",
    "down in {s}",
    "for the people of {s}",
    "by the {d} of {s}",
    "of {s}, not of the {d}",
)
_CHOSEN = (
    "{s} wanted {v} as mayor",
    "as its mayor {s} took {v}",
    "the vote for mayor in {s} went to {v}",
    "{v} beat a {d} and is mayor in {s}",
    "no {d} in {s} but the mayor, {v}",
    "mayor {v} rules {s}",
)
_OWNERS = (
    "{s} got {v} as a {d}",
    "{v} came to {s}",
    "{s} took {v} to the {d}",
    "{v} became a {d} of {s}",
    "for a {d} {s} gave {v} a wash",
    "{v} stays with {s}",
    "they gave {v} to {s}",
    "{s} received {v} from a {d}",
    "{v}, once a {d}, is now with {s}",
    "{s} hid {v} behind the {d}",
    "the {d} left {v} to {s}",
    "nobody but {s} may use {v}",
    "{s} said no to the {d} and holds {v}",
    "before you take {v}, speak to {s}",
    "the {d} let {s} have {v}",
    "{v} has one master, {s}",
)
_TRADES = (
    "{s} serves as {v}",
    "they needed {v} and took {s}",
    "{v} is what {s} is",
    "{s} has the papers of {v}",
    "the {d} made {s} {v}",
    "{s} found work as {v}",
    "once a {d}, {s} is now {v}",
    "{s}, {v}, spoke of the {d}",
    "{s} is known as {v}",
    "the {d} on the {d} calls {s} {v}",
    "nobody wondered when {s} became {v}",
    "{s} turned out {v}, like a {d}",
    "they sent for {s}, {v} for years",
)
_COMPANIONS = (
    "{v} lives with {s}",
    "{v} sleeps at the feet of {s}",
    "{s} has {v}",
    "{v} waits for {s}",
    "{s} and {v} are never apart",
    "{s} takes {v} along",
    "{v} obeys {s}",
    "the {d} of {s} is for {v}",
    "{s} built a {d} for {v}",
    "{v} stays in the {d} of {s}",
    "{s} and {v} have one {d}",
    "the {d} may not come near {v}, said {s}",
    "{v} goes with {s} to the {d}",
    "behind {s} walks {v}",
)
_PUT = (
    "{s} was left",
    "{s} is",
    "someone hid {s}",
    "{s} waits for its owner",
    "one can see {s}",
    "the {d} put {s}",
    "look for {s}",
    "a {d} lies beside {s}",
    "they set {s} down",
    "two men took {s} in and left it",
    "as a {d} had asked, {s} stays",
)
_HOLDERS = (
    "{v} has {s} in it",
    "{v} is where they keep {s}",
    "{v} holds {s}",
    "from {v} one may fetch {s}",
    "to {v} somebody brought {s}",
    "open {v} and see {s}",
    "search {v} for {s}",
    "into {v} the {d} took {s}",
    "{v} was chosen for {s} by the {d}",
)
_NUMBERED = (
    "{s} has {v}",
    "{v} is for {s}",
    "by {v} they mean {s}",
    "at {v} comes {s}",
    "{s} is listed as {v}",
    "the {d} gave {v} to {s}",
    "behind {v} stands {s}",
    "with {v} one gets {s}",
    "{v} on the {d} is {s}",
    "the {d} shows {v} for {s}",
    "{s}, now {v}, is on the {d}",
    "after {v} the {d} came to {s}",
)
_BANKS = (
    "{v} runs past {s}",
    "{v} is the water of {s}",
    "{s} stands by {v}",
    "the {d} of {s} is built over {v}",
    "the {d} in {s} smells of {v}",
    "people in {s} fish in {v}",
    "{v} reaches {s}",
    "{v} carries a {d} to {s}",
    "ships sail up {v} to {s}",
    "{v} took the {d} of {s} away",
    "the {d} of {s} is full of {v}",
    "the people of {s} drink of {v}",
    "twice {v} rose and entered {s}",
)
_ENDINGS = (
    "",
    " in the end",
    " after the {d}",
    " because of a {d}",
    " with a {d}",
    " like a {d}",
    " for the {d}",
    " three times a year",
    " and no {d}",
)


def _ended(*starts: str) -> tuple[str, ...]:
    return tuple(f"{start}{end}." for start, end in product(starts, _ENDINGS))


VISITS = tuple(f"{when}{deed} {spot}." for when, deed, spot in product(_WHEN, _DEEDS, _SPOTS))[::11]
VISITS += tuple(f"{spot} {deed}." for deed, spot in product(_DEEDS, _SPOTS))[::5]
VISIT_QUESTIONS = tuple(form.format(n=noun) for form, noun in product(_SEEN, _PLACES))
VOTES = tuple(f"{opinion} {matter}." for opinion, matter in product(_OPINIONS, _MATTERS))
VOTES += tuple(f"{p} {at}{end}." for p, at, end in product(_PICKS, _LINKS, _LATER))[::5]
VOTES += tuple(f"{topic}, {opinion}." for topic, opinion in product(_TOPICS, _OPINIONS))
VOTE_QUESTIONS = tuple(form.format(n=noun) for form, noun in product(_LEADERS, _TOWNS))
STATEMENTS: dict[str, tuple[str, ...]] = {
    "lives": tuple(f"{stay} {around}." for stay, around in product(_STAYS, _AROUND))
    + _ended(*_HOMES),
    "mayor": tuple(f"{office} {realm}." for office, realm in product(_OFFICES, _REALMS))
    + _ended(*_CHOSEN),
    "stands": tuple(f"{put} {spot}." for put, spot in product(_PUT, _SPOTS))[::3]
    + _ended(*_HOLDERS),
    "owns": _ended(*_OWNERS),
    "works": _ended(*_TRADES),
    "keeps": _ended(*_COMPANIONS),
    "river": _ended(*_BANKS),
    "code": _ended(*_NUMBERED),
}
# Around a statement.
LEADS = (
    "The {d} says that ",
    "By the {d}, ",
    "After the {d}, ",
    "According to the {d}, ",
    "Thanks to a {d}, ",
    "In spite of the {d}, ",
    "Because of a {d}, ",
    "During the {d}, ",
    "On the {d} it says that ",
    "A {d} has shown that ",
    "From the {d} we learned that ",
    "The {d} and the {d} agree that ",
    "They found, with a {d}, that ",
    "No {d} will change it: ",
    "At the {d} and in the {d}, ",
    "The {d} decided that ",
)
TAILS = (
    ", next to the {d}.",
    ", with a {d}.",
    ", said the {d}.",
    ", as a {d}.",
    ", without any {d}.",
    " after the {d}.",
    " because of the {d}.",
    ", like a {d}.",
    ", by order of the {d}.",
    ", and the {d} is gone.",
    ", while the {d} was near.",
    ", and so does the {d}.",
)
