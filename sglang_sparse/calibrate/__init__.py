# SPDX-License-Identifier: Apache-2.0
"""Choices that are measured on a model, and written into its presets."""
