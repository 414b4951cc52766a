# SPDX-License-Identifier: Apache-2.0
"""Builds the reference model's byte-level BPE tokenizer from text that is on any machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_sparse.tasks import words
from sglang_sparse.tasks.corpus import NOISE, documents
from sglang_sparse.tasks.encoding import BOS, CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS

VOCAB_SIZE = 2048
MAX_POSITIONS = 32768
_WORD_REPEATS = 400


def corpus_lines() -> Iterator[str]:
    """The training split's documents, and each key word often enough to be one token."""
    for pieces in documents("train"):
        yield "".join(pieces)
    for _ in range(_WORD_REPEATS):
        for adjective, noun in zip(words.ADJECTIVES * 2, words.NOUNS * 2, strict=False):
            yield f" {adjective}-{noun}"
        yield " ".join(NOISE) + " The magic number is. The pass key is. Variable equals."


def build(vocab_size: int = VOCAB_SIZE) -> Any:
    """Train a ``tokenizers.Tokenizer``: byte-level BPE, digits one by one, chat markers special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus_lines(), trainer)
    return tokenizer


def save(tokenizer: Any, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Build the tokenizer into a folder."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("configs/reference/model"))
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    args = parser.parse_args()
    save(build(args.vocab_size), args.out)


if __name__ == "__main__":
    main()
