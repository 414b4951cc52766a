# SPDX-License-Identifier: Apache-2.0
"""The documentation: short at the front, current, complete, and without dead links."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import DOCS, ROOT

from sglang_sparse.bounded import BOUNDED_RULES
from sglang_sparse.checks import ATTENTION_RULES, check_flags, check_rules
from sglang_sparse.config import ConfigError, Geometry, configs_dir, load_preset, resolve
from sglang_sparse.metrics import COUNTERS
from sglang_sparse.placed import PLACED_RULES
from sglang_sparse.request_options import parse
from sglang_sparse.windowed import WINDOWED_RULES
from sglang_sparse_radix.refusals import HOST_TIER_RULES, RULES, Rule

import refusals  # isort: skip
from site_files import PAGES  # isort: skip

MOST_README_LINES = 150
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
SMALL = Geometry(
    name="small",
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
)


def pages() -> list[Path]:
    return sorted(page for pattern in PAGES for page in ROOT.glob(pattern))


def anchors(page: Path) -> set[str]:
    """The anchors that a git host gives the headings of a page."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    words = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings)
    return {word.replace(" ", "-") for word in words}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_README_LINES


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_internal_link_resolves(page: Path) -> None:
    text = CODE.sub("", FENCED.sub("", page.read_text()))
    for link in LINK.findall(text):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.is_file(), f"{page.name}: {link} is no file of the repository"
        assert not anchor or anchor in anchors(path), f"{page.name}: {link} has no such heading"


def test_what_is_generated_is_current() -> None:
    command = [sys.executable, str(DOCS / "generate.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_every_raw_result_is_cited_by_a_page() -> None:
    cited = "".join(page.read_text() for page in pages())
    scripts = "".join((DOCS / name).read_text() for name in ("figures.py", "generate.py"))
    for results in (ROOT / "loadtest" / "results", ROOT / "kernels" / "bench" / "results"):
        for file in results.rglob("*.*"):
            name = f"{file.parent.name}/{file.name}"
            whole_folder = f"`loadtest/results/{file.parent.name}`" in cited
            assert whole_folder or name in cited or file.name in scripts, f"no page cites {name}"


def test_every_metric_is_explained() -> None:
    text = (DOCS / "metrics.md").read_text()
    for name in COUNTERS:
        assert f"`{name}_total`" in text, name
    assert "`kv_share`" in text
    assert "`plane_bytes`" in text


def bad_config(change: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve("sparcas", json.dumps(change), SMALL)
    return str(caught.value)


BAD_CONFIGS: list[dict[str, object]] = [
    {"score": {"kind": "page_minmax", "logical_page": 64}, "page_size": 16},
    {"score": {"channels": 65}},
    {"layers": {"n": 4}},
    {"layers": {"kind": "anchors", "anchors": [1]}},
    {"layers": {"kind": "anchors", "anchors": [0, 9]}},
    {"budget": {"tokens": 64}},
    {"budget": {"max_tokens": 64}},
    {"budget": {"kind": "mass", "epsilon": 0.9, "cap": 2**24}},
    {"budget": {"kind": "mass", "epsilon": 0.9, "cap": 1024, "margin": 1.0}},
    {"budget": {"kind": "mass", "epsilon": 0.9, "cap": 1024, "estimator": "scored"}},
    {"prefill": {"kind": "tile_topk", "fraction": 0.1, "floor": 64}},
    {"prefill": {"kind": "block_bounds", "fraction": 0.1}},
    {
        "score": {"kind": "page_minmax", "logical_page": 16},
        "prefill": {"kind": "block_bounds", "fraction": 0.1, "floor": 16},
    },
    {"heads": {"kind": "streaming"}},
    {"heads": {"kind": "streaming", "file": "no/such/file.json"}},
    {"heads": {"kind": "streaming", "streaming": [[0]] * 4, "sink": 100}},
    {"heads": {"kind": "streaming", "streaming": [[0]] * 3}},
    {"heads": {"kind": "streaming", "streaming": [[0, 0]] * 4}},
    {"heads": {"kind": "streaming", "streaming": [[9]] * 4}},
    {"model": load_preset("qwen3-8b", "sparcas").model.model_dump()},  # type: ignore[union-attr]
]


@pytest.mark.parametrize("change", BAD_CONFIGS, ids=json.dumps)
def test_a_refused_config_is_one_of_the_listed_refusals(change: dict[str, object]) -> None:
    line = bad_config(change)
    assert any(one.matches(line) for one in refusals.all_refusals()), line


@pytest.mark.parametrize(
    ("method", "config"),
    [
        (None, None),
        ("nothing", None),
        ("custom", None),
        ("sparcas", "no/such/preset"),
        ("sparcas", "generic/psa"),
        ("sparcas", "{"),
        ("sparcas", str(configs_dir() / "missing.json")),
    ],
)
def test_a_refused_method_is_one_of_the_listed_refusals(
    method: str | None, config: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(method, config, SMALL)
    assert any(one.matches(str(caught.value)) for one in refusals.all_refusals()), caught.value


@pytest.mark.parametrize(
    "asked",
    [
        "dense",
        {"sparse": 1},
        {"sparse": {"mode": "dense", "budget": 256}},
        {"sparse": {"budget": 10**9}},
        {"sparse": {"budget": 256.5}},
        {"sparse": {"bugdet": 256}},
        {"sparse": {"mode": "sprase"}},
    ],
    ids=json.dumps,
)
def test_a_refused_request_is_one_of_the_listed_refusals(asked: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(asked, load_preset("generic", "sparcas"))
    assert any(one.matches(str(caught.value)) for one in refusals.all_refusals()), caught.value


@pytest.mark.parametrize(
    "rule", [*RULES, *HOST_TIER_RULES, *ATTENTION_RULES], ids=lambda rule: rule.field
)
def test_a_refused_flag_is_one_of_the_listed_refusals(rule: Rule) -> None:
    host_tier = rule in HOST_TIER_RULES
    args = SimpleNamespace(**{rule.field: "refused"}, enable_hierarchical_cache=host_tier)
    with pytest.raises(ConfigError) as caught:
        check_flags(args, load_preset("generic", "sparcas"))  # type: ignore[arg-type]
    assert any(one.matches(str(caught.value)) for one in refusals.all_refusals()), caught.value


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        *((rule, "`retention.kind` `cascade`") for rule in BOUNDED_RULES),
        *((rule, "`retention.kind` `streaming_window`") for rule in WINDOWED_RULES),
        *((rule, "`placement.kind` `host`") for rule in PLACED_RULES),
    ],
    ids=lambda given: getattr(given, "field", given),
)
def test_a_flag_refused_with_one_kind_is_listed_with_that_kind(rule: Rule, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules(SimpleNamespace(**{rule.field: "refused"}), (rule,))  # type: ignore[arg-type]
    listed = [one for one in refusals.all_refusals() if one.room == what]
    assert any(one.matches(str(caught.value)) for one in listed), caught.value
