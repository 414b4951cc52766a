# SPDX-License-Identifier: Apache-2.0
"""The choices of every axis: one file a choice, with its keys and with what it does at run time.

A choice is found by its folder: ``layers``, ``heads``, ``score``, ``budget`` or ``prefill``. Its
keys need pydantic alone. What runs imports torch and the kernels, and is imported when a server is
built.
"""
