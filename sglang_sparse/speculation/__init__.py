# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding with chains: what is served, and what SGLang's draft workers are told."""
