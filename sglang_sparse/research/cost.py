# SPDX-License-Identifier: Apache-2.0
"""What training costs: ``python -m sglang_sparse.research.cost`` estimates the recipe's tokens.

Products of weights take 6 operations a parameter and token (2 forward, 4 backward). Causal
attention of T tokens takes 2 T operations a channel of the query heads forward, and 2.5 times that
backward, where flash attention computes the scores again.
"""

from sglang_sparse.research.curriculum import FINAL_LENGTHS, FINAL_WEIGHTS, curriculum
from sglang_sparse.research.model import ModelConfig, ReferenceModel
from sglang_sparse.research.train import parser

# Assumed, not measured: what small matrices and attention of 64 channels reach on one H200, and
# the most tokens a second that reading and writing activations of this width allows.
OPERATIONS_A_SECOND = 2.0e14
MOST_TOKENS_A_SECOND = 1.3e6


def operations(config: ModelConfig, parameters: int, length: int) -> float:
    """Floating-point operations of training on one token of a row of ``length`` tokens."""
    channels = config.layers * config.heads * config.head_dim
    return 6.0 * parameters + 7.0 * length * channels


def estimate(
    config: ModelConfig, seconds: float, text_tokens: int
) -> list[tuple[int, float, float]]:
    """``(length, tokens, operations)`` of every text stage; the last is given by its mean length.

    Symbols are left out. A stage also trains on shorter rows, which this does not count, so it
    overstates the operations.
    """
    parameters = sum(p.numel() for p in ReferenceModel(config).parameters())
    result, begun = [], 0.0
    stages = curriculum(config.vocab_size, text_tokens)
    for stage in stages:
        span, begun = (stage.until - begun) * seconds, stage.until
        if stage.kind != "text":
            continue
        length = stage.length
        if stage is stages[-1]:
            length = int(sum(n * w for n, w in zip(FINAL_LENGTHS, FINAL_WEIGHTS, strict=True)))
        each = operations(config, parameters, length)
        tokens = span * min(MOST_TOKENS_A_SECOND, OPERATIONS_A_SECOND / each)
        result.append((length, tokens, tokens * each))
    return result


def main() -> None:
    """Print the estimate of the recipe."""
    args = parser().parse_args(["--tokenizer", "-", "--corpus", "-"])
    config = ModelConfig(4096, layers=args.layers, intermediate_size=args.intermediate_size)
    rows = estimate(config, args.time_limit, args.text_tokens)
    for length, tokens, work in rows:
        print(f"{length:>6} tokens a row: {tokens / 1e6:6.0f} M tokens, {work / 1e15:6.1f} PFLOP")
    tokens, work = sum(r[1] for r in rows), sum(r[2] for r in rows)
    print(f"{args.time_limit:.0f} s: {tokens / 1e9:.2f} B tokens, {work / 1e15:.0f} PFLOP")


if __name__ == "__main__":
    main()
