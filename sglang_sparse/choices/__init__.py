# SPDX-License-Identifier: Apache-2.0
"""The choices of every axis. Each choice has a file, with its keys and its behaviour at run time.

A choice is found by its folder: ``layers``, ``heads``, ``score``, ``budget``,
``prefill`` or ``retention``. Its keys need pydantic alone. Its run time imports torch and the
kernels, when a server is built.
"""
