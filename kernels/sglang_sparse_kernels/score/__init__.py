# SPDX-License-Identifier: Apache-2.0
"""Scores of tokens (SparCas) and of logical pages (Quest) for the query of a decode step."""

from .api import page_bounds, page_minmax_score, select_channels, sketch_score

__all__ = ["page_bounds", "page_minmax_score", "select_channels", "sketch_score"]
