# SPDX-License-Identifier: Apache-2.0
"""How many long requests a server holds at once before it retracts one.

Prompts that share nothing are sent at the same time. Those that fit are prefilled and decoded
together, the others wait for room. A request that is retracted had no room to finish: then one
fewer than were decoded together are sent, until none is retracted.

    python loadtest/requests_that_fit.py --base-url http://127.0.0.1:30000 --length 120000 --most 12

It works on any SGLang server over HTTP, without a tokenizer, so on dummy weights. The server says
which requests it retracted (`num_retractions`); it must allow `--most` running requests.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from client import Record, call, server_url, stream

Ask = Callable[[int], list[Record]]


def most_at_once(records: Sequence[Record]) -> int:
    """The most requests that were between their first and their last token at one time."""
    changes = []
    for record in records:
        if record.first_token is not None:
            changes.append((record.started + record.first_token, 1))
            changes.append((record.started + record.total, -1))
    found = running = 0
    for _, change in sorted(changes):  # one that ends makes room before the next begins
        running += change
        found = max(found, running)
    return found


def ask_together(
    base_url: str, count: int, *, length: int, tokens: int, vocab: int
) -> list[Record]:
    """Send so many prompts at once, and follow them to their ends."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}

    def ask(number: int) -> Record:
        source = random.Random(f"{length} {number}")
        prompt = [source.randrange(10, vocab) for _ in range(length)]
        body = {"input_ids": prompt, "sampling_params": params}
        return stream(base_url, "generate", body, name=str(number), timeout=1800)

    with ThreadPoolExecutor(count) as pool:
        records = list(pool.map(ask, range(count)))
    for record in records:
        if record.error is None and record.output_tokens != tokens:
            record.error = f"{record.output_tokens} of {tokens} tokens came"
    return records


def rounds_until_none_is_retracted(ask: Ask, most: int) -> list[dict[str, int]]:
    """What happened in each round, of which the last retracted nothing.

    Args:
        ask: sends so many requests.
        most: that the first round sends.

    Raises:
        RuntimeError: a request failed, or even one alone is retracted.
    """
    rounds: list[dict[str, int]] = []
    while True:
        records = ask(most)
        errors = {record.error for record in records if record.error is not None}
        if errors:
            raise RuntimeError(f"{len(records)} requests: {'; '.join(sorted(errors))}")
        held, retracted = most_at_once(records), sum(record.retractions > 0 for record in records)
        rounds.append({"sent": most, "at_once": held, "retracted": retracted})
        if not retracted:
            return rounds
        if held < 2:
            raise RuntimeError("a request alone was retracted: the server has no room for one")
        most = min(most, held) - 1


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--base-url", type=server_url, required=True)
    parser.add_argument("--length", type=int, default=120_000, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each answer")
    parser.add_argument("--most", type=int, default=12, help="requests of the first round")
    parser.add_argument("--vocab", type=int, default=30_000, help="tokens are drawn below this")
    args = parser.parse_args()
    ask: Any = partial(
        ask_together, args.base_url, length=args.length, tokens=args.tokens, vocab=args.vocab
    )
    try:
        rounds = rounds_until_none_is_retracted(ask, args.most)
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    info = call(args.base_url, "/server_info")
    last = rounds[-1]
    if last["at_once"] == args.most:
        print(f"all {args.most} fit: raise --most to find how many do", file=sys.stderr)
    shape = {"length": args.length, "tokens": args.tokens}
    pool = {"max_total_num_tokens": info["max_total_num_tokens"]}
    print(json.dumps(shape | pool | {"held": last["at_once"], "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
