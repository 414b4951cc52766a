# SPDX-License-Identifier: Apache-2.0
"""Prompts for servers of the reference model."""

from collections.abc import Sequence

from sglang_sparse.tasks import TaskSuite


def cut_documents(suite: TaskSuite, lengths: Sequence[int], count: int) -> list[list[int]]:
    """Token ids of `count` documents cut at each of `lengths`, then the question.

    Number i is document i % count. The lengths of one document share a prefix, so that what was
    prefilled once is reused.
    """
    prompts = []
    documents = suite.samples("multi_key", length=max(lengths), count=count, seed=1)
    for length in lengths:
        for document in documents:
            question = document.prompt[document.prompt.rindex("\n\n") :]
            tail = suite.encoder.encode(question)
            if document.prompt_ids[-len(tail) :] != tail:
                raise ValueError("the question is not the end of the prompt")
            prompts.append(document.prompt_ids[: length - len(tail)] + tail)
    return prompts
