# SPDX-License-Identifier: Apache-2.0
"""Check the installed wheel: packages, entry points, presets, and no stray top-level names.

Runs in a virtual environment that holds the wheel and pydantic only, outside the repository.
"""

import importlib.util
import sys
from importlib.metadata import distribution
from pathlib import Path

EXPECTED_TOP_LEVEL = {"sglang_sparse", "sglang_sparse_kernels", "sglang_sparse_radix"}
EXPECTED_ENTRY_POINTS = {
    ("sglang.srt.plugins", "sglang_sparse", "sglang_sparse.plugin:load"),
    ("sglang.srt.platforms", "sglang_sparse_cpu", "sglang_sparse.platform_cpu:activate"),
    ("console_scripts", "sglang-sparse", "sglang_sparse.cli:main"),
}


def check(condition: bool, message: str) -> None:
    """End the run with `message` unless `condition` holds."""
    if not condition:
        sys.exit(f"wheel check failed: {message}")


def main() -> None:
    """Run every check."""
    dist = distribution("sglang-sparse")
    files = [str(file) for file in dist.files or []]
    top_level = {file.split("/")[0] for file in files if file.endswith((".py", ".json"))}
    top_level = {name for name in top_level if not name.endswith(".dist-info")}
    check(top_level == EXPECTED_TOP_LEVEL, f"top-level packages are {sorted(top_level)}")
    research = [file for file in files if file.startswith("sglang_sparse/research/")]
    check(not research, f"research code is inside: {research}")
    check(not any(file.endswith(".safetensors") for file in files), "model weights are inside")

    found = {(ep.group, ep.name, ep.value) for ep in dist.entry_points}
    check(found == EXPECTED_ENTRY_POINTS, f"entry points are {sorted(found)}")
    for _, _, value in found:
        module = value.split(":")[0]
        check(importlib.util.find_spec(module) is not None, f"no module {module}")

    import sglang_sparse
    from sglang_sparse.config import list_presets, load_preset, resolve

    check("site-packages" in str(Path(sglang_sparse.__file__)), "imported from the checkout")
    presets = list_presets()
    check(len(presets) > 0, "no presets are inside")
    for ref in presets:
        load_preset(ref.model, ref.name)
        resolve(None, str(ref))
    print(f"wheel {dist.version}: {len(files)} files, {len(presets)} presets, entry points found")


if __name__ == "__main__":
    main()
