# SPDX-License-Identifier: Apache-2.0
"""The task generators: seeded, exact, within length, and split without overlap."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sglang_sparse.tasks import SPLITS, TASKS, FileEncoder, TaskSuite, in_split, is_exact, words
from sglang_sparse.tasks.corpus import documents
from sglang_sparse.tasks.layout import ContextBuilder
from sglang_sparse.tasks.sample import Needle

MODEL = Path(__file__).parents[2] / "configs" / "reference" / "model"


@pytest.fixture(scope="module")
def encoder() -> FileEncoder:
    return FileEncoder(MODEL)


@pytest.fixture(scope="module")
def suite(encoder: FileEncoder) -> TaskSuite:
    return TaskSuite(encoder, "heldout")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [512, 2048, 32768])
def test_prompt_and_answer_fit_and_ids_are_the_text(
    suite: TaskSuite, encoder: FileEncoder, task: str, length: int
) -> None:
    sample = suite.sample(task, length, seed=3, index=1)
    # A word of a list comes a whole number of times, so a short list is shorter still.
    least = 0.75 if task == "distant_words" else 0.8
    assert least * length < len(sample.prompt_ids) + len(sample.answer_ids) <= length
    assert encoder.encode(sample.prompt) == sample.prompt_ids
    assert is_exact(sample, sample.answer)


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_sample_whatever_was_drawn_before(suite: TaskSuite, task: str) -> None:
    first = suite.sample(task, 512, seed=5, index=2)
    suite.sample(task, 512, seed=6, index=0)
    assert suite.sample(task, 512, seed=5, index=2) == first
    assert suite.sample(task, 512, seed=5, index=3).prompt != first.prompt
    assert suite.sample(task, 512, seed=6, index=2).prompt != first.prompt


def test_needles_stand_where_the_sample_says(suite: TaskSuite, encoder: FileEncoder) -> None:
    sample = suite.sample("multi_key", 2048, seed=1)
    texts = [encoder.decode(sample.prompt_ids[a:b]).strip() for a, b in sample.needle_spans]
    assert texts[0] == sample.answer
    assert len(set(texts)) == 8
    assert all(t.startswith("The magic number for ") for t in texts)


def test_needles_may_leave_no_room_for_filler(encoder: FileEncoder) -> None:
    needle = Needle("The pass key is 12345.", 0.5)
    builder = ContextBuilder(encoder, "heldout")
    for style in ("noise", "text"):
        spare = 3  # tokens, fewer than any piece of filler has
        room = len(encoder.encode("\n" + needle.text)) + spare
        context = builder.build(np.random.default_rng(1), [needle], room, style)
        assert context.text.strip() == needle.text


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_needle_at_depth_lands_there(suite: TaskSuite, depth: float) -> None:
    sample = suite.sample("single_key", 4096, seed=1, depth=depth)
    (start, _), total = sample.needle_spans[0], len(sample.prompt_ids)
    assert abs(start / total - depth) < 0.03


def test_splits_share_no_key_name_value_or_document() -> None:
    for pool in (words.keys, words.variable_names, words.values, words.list_words):
        train, held = set(pool("train")), set(pool("heldout"))
        assert train
        assert held
        assert not train & held
    train, held = set(documents("train")), set(documents("heldout"))
    assert len(held) > 50
    assert not train & held


def test_samples_draw_from_their_split_alone(encoder: FileEncoder, suite: TaskSuite) -> None:
    for index in range(20):
        sample = suite.sample("multi_value", 512, seed=9, index=index)
        assert all(in_split(v, "heldout") for v in sample.values)


def test_variable_tracking_has_two_to_four_hops(suite: TaskSuite) -> None:
    hops = {
        suite.sample("variable_tracking", 512, 1, i).answer.count("Variable") for i in range(30)
    }
    assert hops == {2, 3, 4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no_such_task", 512), "unknown task"),
        (("single_key", 128), "outside"),
        (("single_key", 65536), "outside"),
        (("single_key", 512, 0, 0, 1.5), "depth"),
        (("common_words", 512, 0, 0, 0.5), "no needle"),
    ],
)
def test_bad_requests_say_what_is_allowed(
    suite: TaskSuite, arguments: tuple[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        suite.sample(*arguments)


def test_unknown_split_is_refused(encoder: FileEncoder) -> None:
    assert SPLITS == ("train", "heldout")
    with pytest.raises(ValueError, match="unknown split"):
        TaskSuite(encoder, "validation")


def test_distant_words_stand_in_the_first_half_of_the_list_alone(suite: TaskSuite) -> None:
    for length in (400, 1500, 4096):
        for drawn in suite.samples("distant_words", length, 6, seed=4):
            words = drawn.content.split("\n\n")[0].split()
            counts = Counter(words)
            assert {*drawn.values} == {word for word, _ in counts.most_common(3)}
            assert len(counts) == 24
            # A list is cut to its tokens at its end; few lists lose a third.
            assert not {*drawn.values} & {*words[int(len(words) * 0.75) :]}
