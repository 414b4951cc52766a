# SPDX-License-Identifier: Apache-2.0
"""Chat markers and the small interface that the tasks need from a tokenizer."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

BOS = "<|bos|>"
PAD = "<|pad|>"
END = "<|end|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, END, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def split_turns(chat: str) -> list[tuple[str, str]]:
    """``(role, message)`` of each turn of ``chat``, which begins and ends as a user's message."""
    parts = re.split(r"<\|end\|><\|(user|assistant)\|>", chat)
    return list(zip(["user", *parts[1::2]], parts[::2], strict=True))


class Encoder(Protocol):
    """Turns text, chat markers included, into token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with nothing added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without chat markers."""
        ...


class FileEncoder:
    """An encoder over a ``tokenizer.json``."""

    def __init__(self, path: str | Path) -> None:
        """Load ``path``, a ``tokenizer.json`` or the folder that holds one.

        Raises:
            FileNotFoundError: there is no such file.
        """
        from tokenizers import Tokenizer

        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(f"no tokenizer at {file}")
        self._tokenizer: Any = Tokenizer.from_file(str(file))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return int(self._tokenizer.get_vocab_size())

    def token_id(self, token: str) -> int:
        """Id of a token.

        Raises:
            KeyError: the vocabulary lacks it.
        """
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise KeyError(token)
        return int(token_id)

    def piece(self, token_id: int) -> str:
        """What the vocabulary calls a token; in a byte-level one, a character for each byte."""
        return str(self._tokenizer.id_to_token(token_id))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of every text."""
        return [
            list(e.ids) for e in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


class HuggingFaceEncoder:
    """An encoder over a transformers tokenizer, for models other than the reference one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of every text; thousands of them in a fraction of the time."""
        encoded = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
