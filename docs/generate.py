# SPDX-License-Identifier: Apache-2.0
"""Write the parts of the documentation that code and raw results decide: `make schema` runs it.

    python docs/generate.py            # writes
    python docs/generate.py --check    # ends with status 1 if a page is not current

Each part stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; `PARTS` says in which page.
"""

import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from figures import headline, picture, psa_dense, psa_fixed, psa_preset, psa_served
from latency_tables import RESULTS, decode_table
from refusals import BLANK, Refusal, all_refusals

from sglang_sparse.config import json_schema, list_presets, load_preset

ROOT = Path(__file__).parents[1]
Schema = dict[str, Any]

# Where a refusal is raised -> under which title it stands, in the order of the page.
TITLES = {
    "rules": "Server flags and environment variables that are not supported",
    "checks": "Server flags and models",
    "backend": "Server flags and models",
    "bounded": "Server flags and models",
    "state_pools": "Server flags and models",
    "windowed": "Server flags and models",
    "window_pools": "Server flags and models",
    "placed": "Server flags and models",
    "placed_pools": "Server flags and models",
    "compat": "Server flags and models",
    "hooks": "Server flags and models",
    "flags": "Flags of this plugin",
    "load": "Methods, presets and config files",
    "reach": "Methods, presets and config files",
    "config": "Rules between the keys of a config",
    "layers": "Rules between the keys of a config",
    "heads": "Rules between the keys of a config",
    "score": "Rules between the keys of a config",
    "budget": "Rules between the keys of a config",
    "retention": "Rules between the keys of a config",
    "prefill": "Rules between the keys of a config",
    "placement": "Rules between the keys of a config",
    "choices": "Rules between the keys of a config",
    "request_options": "Requests (HTTP status 400)",
    "endpoints": "Requests (HTTP status 400)",
    "calibrate": "sglang-sparse calibrate",
    "evaluate": "sglang-sparse eval",
    "": "Other",
}


def cell(text: str) -> str:
    """Text that is safe in a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    heads = list(heads)
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    return [*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in rows), ""]


def _resolve(part: Schema, schema: Schema) -> Schema:
    """The definition that a `$ref` names, else the part itself."""
    name = part.get("$ref", "").rpartition("/")[2]
    return schema["$defs"][name] if name else part


def _type(part: Schema, schema: Schema) -> str:
    """The type of a key in words, with its range."""
    part = _resolve(part, schema)
    if "anyOf" in part:
        return " or ".join(_type(one, schema) for one in part["anyOf"])
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    if "enum" in part:
        return ", ".join(f"`{json.dumps(one)}`" for one in part["enum"])
    kind = part.get("type", "object")
    words = {"integer": "whole number", "number": "number", "string": "text", "object": "object"}
    if kind == "array":
        return f"list of: {_type(part.get('items', {}), schema)}"
    signs = (
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    )
    # 2**24 only keeps counts in int32; no user comes near it.
    bounds = [f"{sign} {part[key]}" for key, sign in signs if part.get(key, 2**24) != 2**24]
    return ", ".join([words.get(kind, f"`{kind}`"), *bounds])


def _default(part: Schema) -> str:
    if "default" not in part:
        return "none: must be given"
    return f"`{json.dumps(part['default'])}`"


def _keys(definition: Schema, schema: Schema) -> list[str]:
    """The table of an object's keys, but for its kind."""
    rows = [
        (f"`{name}`", _type(part, schema), _default(part), part.get("description", ""))
        for name, part in definition["properties"].items()
        if name != "kind"
    ]
    return table(("key", "value", "default", "meaning"), rows) if rows else []


def _intro(definition: Schema) -> str:
    return str(definition.get("description", "")).replace("\n", " ").replace("  ", " ")


def configuration() -> str:
    """Every key of a config, axis by axis, from the JSON schema."""
    schema = json_schema()
    lines: list[str] = []
    plain: dict[str, Schema] = {}
    for axis, part in schema["properties"].items():
        choices = part.get("oneOf") or ([part] if "$ref" in part else [])
        kinds = [_resolve(choice, schema) for choice in choices]
        if not kinds or "kind" not in kinds[0]["properties"]:
            plain[axis] = part
            continue
        lines += [f"### {axis}", ""]
        for definition in kinds:
            kind = definition["properties"]["kind"].get("const")
            given = " (the default)" if part.get("default", {}).get("kind") == kind else ""
            lines += [f"**`{kind}`**{given}: {_intro(definition)}", "", *_keys(definition, schema)]
    lines += ["### Other keys", "", *_keys({"properties": plain}, schema)]
    for name in ("Geometry", "Reuse", "Calibration", "HeadsModel", "HeadsCalibration"):
        if name in schema["$defs"]:
            definition = schema["$defs"][name]
            lines += [f"### {name}", "", _intro(definition), "", *_keys(definition, schema)]
    return "\n".join(lines).rstrip()


def presets() -> str:
    """What each shipped preset is: model, score, budget, layers, and from when it is sparse."""
    rows = []
    for ref in list_presets():
        config = load_preset(ref.model, ref.name)
        axes = config.model_dump(mode="json")
        budget = {key: value for key, value in axes["budget"].items() if value is not None}
        score = {key: value for key, value in axes["score"].items() if key != "reduce"}
        rows.append(
            (
                f"`{ref}`",
                _short(score),
                _short({key: budget[key] for key in list(budget)[:3]}),
                _short({k: v for k, v in axes["layers"].items() if k in ("kind", "n", "anchors")}),
                axes["prefill"]["kind"],
                "never: holds a bounded number of tokens"
                if config.retention.bounded
                else f"{config.min_sparse_tokens:,}",
            )
        )
    heads = ("preset", "score", "budget", "layers", "prefill", "sparse from, tokens")
    return "\n".join(table(heads, rows)).rstrip()


def _short(values: dict[str, Any]) -> str:
    kind = values.pop("kind")
    return ", ".join([str(kind), *(f"{key} {value}" for key, value in values.items())])


def _title(refusal: Refusal) -> str:
    return TITLES.get(refusal.module) or TITLES.get(refusal.room) or TITLES[""]


def _alternatives(site: list[Refusal]) -> Iterable[str]:
    """The four cells of what one place in the code refuses; several texts stand side by side."""
    flags = dict.fromkeys("the flag" if one.flag == BLANK else f"`{one.flag}`" for one in site)
    yield ", ".join(flags)
    for key in ("problem", "allowed", "remedy"):
        yield " / ".join(dict.fromkeys(getattr(one, key) for one in site))


def refusals() -> str:
    """Every refusal, under the title of where it is raised."""
    found = all_refusals()
    lines: list[str] = []
    for title in dict.fromkeys(TITLES.values()):
        group = [one for one in found if _title(one) == title]
        if not group:
            continue
        lines += [f"### {title}", ""]
        if group[0].module == "rules":
            lines += [
                "Drop the flag or unset the variable, or serve without `--attention-backend "
                "sparse`.",
                "",
                *table(
                    ("flag or variable", "only with", "allowed", "why"),
                    ((f"`{one.flag}`", one.room, one.allowed, one.problem) for one in group),
                ),
            ]
            continue
        sites: dict[tuple[str, str, int], list[Refusal]] = {}
        for one in group:
            sites.setdefault((one.room, one.module, one.line), []).append(one)
        rows = dict.fromkeys(
            tuple(_alternatives(site))
            for site in sites.values()
            if any({one.flag, one.problem} != {BLANK} for one in site)
        )
        lines += table(("on", "the line says", "allowed", "what to do"), rows)
    return "\n".join(lines).rstrip()


def capacity(folder: str) -> str:
    """The table of the committed reports of a folder, as `loadtest/report.py` writes it."""
    sys.path.insert(0, str(ROOT / "loadtest"))
    from report import markdown, read_reports

    return str(markdown(read_reports(sorted((RESULTS / folder).glob("*.json.gz")))))


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "headline": ("README.md", headline),
    "shipped": ("docs/results.md", partial(decode_table, "h200-shipped")),
    "results": ("docs/results.md", partial(decode_table, "h200")),
    "first-token": ("docs/results.md", partial(decode_table, "h200-first-token")),
    "two-gpus": ("docs/results.md", partial(decode_table, "h200-two-gpus")),
    "capacity": ("docs/results.md", partial(capacity, "capacity-h200")),
    "beyond-memory": ("docs/results.md", partial(capacity, "h200-beyond-memory")),
    "psa-served": ("docs/results.md", psa_served),
    "psa-dense": ("docs/results.md", psa_dense),
    "psa-fixed": ("docs/results.md", psa_fixed),
    "psa-preset": ("docs/results.md", psa_preset),
    "keys": ("docs/configuration.md", configuration),
    "presets": ("docs/configuration.md", presets),
    "refusals": ("docs/troubleshooting.md", refusals),
}
PICTURE = "docs/images/time-per-token.svg"


def filled(text: str, name: str, part: str) -> str:
    """A page's text with a part between its markers."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{part}\n{end}{after}"


def main() -> None:
    """Write every part, or check that every page is current."""
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page, _ in PARTS.values()}
    for name, (page, make) in PARTS.items():
        texts[page] = filled(texts[page], name, make())
    texts[PICTURE] = picture()
    stale = [
        page
        for page, text in texts.items()
        if not (ROOT / page).is_file() or (ROOT / page).read_text(encoding="utf-8") != text
    ]
    if "--check" not in sys.argv:
        for page in stale:
            (ROOT / page).write_text(texts[page], encoding="utf-8")
    elif stale:
        sys.exit(f"not current: {', '.join(stale)}; run `make schema`")


if __name__ == "__main__":
    main()
