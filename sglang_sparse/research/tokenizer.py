# SPDX-License-Identifier: Apache-2.0
"""Builds the reference model's byte-level BPE tokenizer from the corpus and the tasks' filler.

The model is small, so its embedding is paid in layers: 4,096 tokens of width 256 are a sixth of 12
MiB. Bytes a token on held-out English: 2.63 at 2,048 tokens, 2.83 at 3,072, 2.96 at 4,096, 3.24 at
8,192.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sglang_sparse.research.corpus.build import DOCUMENT_END
from sglang_sparse.tasks.corpus import documents
from sglang_sparse.tasks.encoding import BOS, CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS

VOCAB_SIZE = 4096
MAX_POSITIONS = 32768


def corpus_lines(corpus: Path) -> Iterator[str]:
    """Documents of the training split: of ``corpus``, a built corpus, and of the tasks' filler."""
    yield from (corpus / "train.txt").read_text().split(DOCUMENT_END)[:-1]
    for pieces in documents("train"):
        yield "".join(pieces)


def build(lines: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Any:
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
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def save(tokenizer: Any, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
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
    parser.add_argument("--corpus", type=Path, required=True, help="folder of a built corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    args = parser.parse_args()
    save(build(corpus_lines(args.corpus), args.vocab_size), args.out)


if __name__ == "__main__":
    main()
