# SPDX-License-Identifier: Apache-2.0
"""The few HTTP calls that an evaluation makes."""

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from sglang_sparse.config import ConfigError
from sglang_sparse.evaluate.arms import Arm
from sglang_sparse.tasks import Encoder, FileEncoder, HuggingFaceEncoder

_TIMEOUT_SECONDS = 1800


class Server:
    """A running SGLang server with sparse attention.

    Attributes:
        state: the `sparse` block of its `/server_info`.
        model: the name it serves under.
    """

    def __init__(self, base_url: str) -> None:
        """Read the state of the server at `base_url`.

        Raises:
            ConfigError: no server answers, or the server is dense.
        """
        self.base_url = base_url.rstrip("/")
        try:
            info = self._call("/server_info")
        except (RuntimeError, ValueError) as error:
            raise self._refuse(f"no SGLang server answered ({error})") from error
        if not isinstance(info, dict):
            raise self._refuse("what answered is no SGLang server")
        self.info: dict[str, Any] = info
        states = self.info.get("internal_states") or [{}]
        if "sparse" not in states[0]:
            raise self._refuse("its server was not started with --attention-backend sparse")
        self.state: dict[str, Any] = states[0]["sparse"]
        self.model = str(self.info["served_model_name"])

    def _refuse(self, problem: str) -> ConfigError:
        return ConfigError(
            flag="--base-url",
            value=self.base_url,
            problem=problem,
            allowed="the address, without /v1, of a running server with --attention-backend sparse",
            remedy="start one, for example with `make serve`",
        )

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base_url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise RuntimeError(f"{path} answered {error.code}: {text[:500]}") from error
        except (OSError, HTTPException) as error:
            raise RuntimeError(f"{path} was not answered ({error})") from error

    @property
    def tokenizer_path(self) -> str:
        """Name or path of the tokenizer that the server says it uses."""
        return str(self.info.get("tokenizer_path") or self.info["model_path"])

    def context_length(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return int(self._call("/v1/models")["data"][0]["max_model_len"])

    def encoder(self, path: str | None) -> Encoder:
        """The tokenizer at `path`, or the one that the server says it uses.

        Raises:
            ConfigError: it is not on this machine, as may be when the server runs on another.
        """
        where = path or self.tokenizer_path
        try:
            if (Path(where) / "tokenizer.json").is_file() or Path(where).is_file():
                return FileEncoder(where)
            from transformers import AutoTokenizer

            return HuggingFaceEncoder(AutoTokenizer.from_pretrained(where))
        except Exception as error:  # tokenizers and transformers raise what they like
            raise ConfigError(
                flag="--tokenizer",
                value=where,
                problem=f"it cannot be loaded ({type(error).__name__}: {error})",
                allowed="a folder with a tokenizer.json, or a name that transformers knows",
                remedy="name the tokenizer of the served model",
            ) from error

    def reply(self, messages: list[dict[str, str]], max_tokens: int, arm: Arm) -> str:
        """The greedy answer to a chat."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "custom_params": arm.custom_params,
        }
        return str(self._call("/v1/chat/completions", body)["choices"][0]["message"]["content"])

    def forced_logprobs(
        self, prompt: list[int], forced: list[int], arm: Arm, processor: str
    ) -> list[float]:
        """Log-probabilities reported for `forced`, decoded token by token after `prompt`.

        Args:
            prompt, forced: token ids.
            processor: a serialized custom logit processor that reads `custom_params.forced`.
        """
        body = {
            "input_ids": prompt,
            # Windows of one text may begin alike. The cache keeps prompts of different lengths
            # apart, and prompts of one length never continue another's decoded tokens. So every
            # prompt was computed by a prefill, and all arms share it.
            "extra_key": f"sglang-sparse eval: {len(prompt)} tokens",
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": len(forced),
                "ignore_eos": True,
                "custom_params": {**arm.custom_params, "forced": forced},
            },
            "custom_logit_processor": processor,
            "return_logprob": True,
        }
        answer = self._call("/generate", body)
        tokens = answer["meta_info"]["output_token_logprobs"]
        if [token for _, token, _ in tokens] != forced:
            raise RuntimeError("the server decoded other tokens than it was told to")
        return [logprob for logprob, _, _ in tokens]
