# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of a prompt that is new, cached on the device, and evicted to the host.

By HTTP alone, without a tokenizer, so that servers with dummy weights can be measured. The server
needs `--enable-hierarchical-cache`, and a host tier that holds all prompts together:

    python loadtest/evicted_latency.py --base-url http://127.0.0.1:30000 --length 120000 --others 6

Other prompts of the same length are asked until nothing of the first one is left on the device. The
server itself tells where a prefix was; a row whose prefix was elsewhere than meant is an error.
"""

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

from client import call, server_url


def first_token(base_url: str, prompt: list[int]) -> tuple[float, dict[str, int], int]:
    """Seconds to one token, where its prefix was cached (tokens by tier), and the token."""
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    body |= {"return_logprob": True}
    begin = time.perf_counter()
    meta = call(base_url, "/generate", body, timeout=600)["meta_info"]
    seconds = time.perf_counter() - begin
    found = meta.get("cached_tokens_details") or {"device": 0, "host": 0}
    return seconds, found, meta["output_token_logprobs"][0][1]


def measure(
    base_url: str, *, length: int, others: int, repeats: int, vocab: int
) -> dict[str, dict[str, Any]]:
    """Seconds to the first token by where the prefix was: `new`, `device`, `host`.

    Raises:
        RuntimeError: a prefix was elsewhere than meant, or answers differ.
    """
    source = random.Random(length)
    prompts = [[source.randrange(10, vocab) for _ in range(length)] for _ in range(1 + others)]
    rows: dict[str, list[tuple[float, dict[str, int], int]]] = {"new": [], "device": [], "host": []}
    rows["new"].append(first_token(base_url, prompts[0]))
    for _ in range(repeats):
        rows["device"].append(first_token(base_url, prompts[0]))
        for prompt in prompts[1:]:
            first_token(base_url, prompt)
        rows["host"].append(first_token(base_url, prompts[0]))
    for tier, found in rows.items():
        for _, cached, _ in found:
            elsewhere = {name: count for name, count in cached.items() if count and name != tier}
            if elsewhere or (tier != "new" and not cached[tier]):
                raise RuntimeError(f"a prompt meant to be {tier} was cached in {cached}")
    if len({token for _, _, token in [*rows["device"], *rows["host"]]}) != 1:
        raise RuntimeError("the first token of an evicted prompt differs")
    return {
        tier: {
            "seconds": statistics.median(seconds for seconds, _, _ in found),
            "all_seconds": [round(seconds, 4) for seconds, _, _ in found],
            "cached_tokens": found[0][1].get(tier, 0),
        }
        for tier, found in rows.items()
    }


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--base-url", type=server_url, required=True)
    parser.add_argument("--length", type=int, default=120_000, help="tokens of each prompt")
    parser.add_argument("--others", type=int, default=6, help="prompts that evict the first one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=30_000, help="tokens are drawn below this")
    args = parser.parse_args()
    try:
        found = measure(
            args.base_url,
            length=args.length,
            others=args.others,
            repeats=args.repeats,
            vocab=args.vocab,
        )
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
