# SPDX-License-Identifier: Apache-2.0
"""Every refusal of the project, read from its source: flag, problem, what is allowed, what to do.

A refusal is built by `ConfigError(...)`, by `InvalidConfig(...)`, or by a helper that returns one.
Calls are expanded until the four texts are known; what only a run can tell is `BLANK`. The rules
of `sglang_sparse_radix.refusals` and `sglang_sparse` are data, and are imported.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).parents[1]
PACKAGES = ("sglang_sparse", "radix_ext/sglang_sparse_radix")
BLANK = "…"
_KEYS = {
    "ConfigError": ("flag", "value", "problem", "allowed", "remedy"),
    "InvalidConfig": ("problem", "allowed", "remedy"),
}
_FLAG_OF_A_KEY = "--sparse-config"


@dataclass(frozen=True, order=True)
class Refusal:
    """One refusal; `BLANK` stands for what depends on the setting.

    Attributes:
        room: the folder of the file that raises it, such as `config`; of a rule what it holds with,
            nothing if it always holds.
        module: that file, such as `checks`.
        line: its line there; 0 for a rule.
        flag: the flag, key or file that carried the setting.
        problem: what is wrong.
        allowed: what would have been right.
        remedy: what to do.
    """

    room: str
    module: str
    line: int
    flag: str
    problem: str
    allowed: str
    remedy: str

    def matches(self, line: str) -> bool:
        """Tell whether `line`, the text of a `ConfigError`, is this refusal."""
        tail = f": {self.problem}; allowed: {self.allowed}; {self.remedy}"
        return re.fullmatch(f"{_pattern(self.flag)}.*?{_pattern(tail)}", line) is not None


def _pattern(text: str) -> str:
    return ".*".join(re.escape(part) for part in text.split(BLANK))


Names = dict[str, list[str]]


@dataclass(frozen=True)
class _Module:
    """A parsed file: functions that return a refusal, and what it imports from other files."""

    room: str
    name: str
    tree: ast.Module
    helpers: dict[str, ast.FunctionDef]
    imported: set[str]


class _Source:
    """The parsed packages, and the texts that their module-level names stand for."""

    def __init__(self) -> None:
        files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
        self.modules = [_read(file) for file in files]
        self.functions = {
            f.name: f for module in self.modules for f in module.tree.body if _returns_text(f)
        }
        self.constants: dict[str, str] = {}
        for node in (node for module in self.modules for node in module.tree.body):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                texts = self.texts(node.value, {})
                if len(texts) == 1 and BLANK not in texts[0]:
                    self.constants[node.targets[0].id] = texts[0]

    def refusals(self) -> Iterator[Refusal]:
        """Every refusal that the packages can raise, but for those that only pass one on."""
        for module in self.modules:
            helpers = {id(helper) for helper in module.helpers.values()}
            for function in _functions(module.tree):
                if id(function) in helpers:
                    continue
                names = self._assigned(function, {})
                for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                    for found in self._expand(module, call, names):
                        if {found["problem"], found["allowed"]} != {BLANK}:
                            yield Refusal(module.room, module.name, call.lineno, **found)

    def texts(self, node: ast.expr | None, names: Names) -> list[str]:
        """What an expression can be as text: one or several, with `BLANK` for the unknown."""
        match node:
            case ast.Constant(value=value) if value is not None:
                return [str(value)]
            case ast.JoinedStr(values=parts):
                return ["".join(found) for found in product(*(self.texts(p, names) for p in parts))]
            case ast.FormattedValue(value=value):
                return self.texts(value, names)
            case ast.IfExp(body=body, orelse=orelse):
                return [*self.texts(body, names), *self.texts(orelse, names)]
            case ast.Name(id=name):
                return names.get(name) or [self.constants.get(name, BLANK)]
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                return self._returned(self.functions[name], node, names)
        return [BLANK]

    def _returned(self, function: ast.FunctionDef, call: ast.Call, names: Names) -> list[str]:
        """What a call of a function that returns a text can return."""
        order = [argument.arg for argument in function.args.args]
        given = {key.arg: self.texts(key.value, names) for key in call.keywords if key.arg}
        given |= {key: self.texts(a, names) for key, a in zip(order, call.args, strict=False)}
        inner = self._assigned(function, given)
        returns = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
        return [text for value in returns for text in self.texts(value, inner)]

    def _assigned(self, function: ast.FunctionDef, given: Names) -> Names:
        """Texts of a function's arguments (`given`, else their defaults) and local names."""
        arguments = function.args
        pairs = list(zip(reversed(arguments.args), reversed(arguments.defaults), strict=False))
        names = {argument.arg: self.texts(default, {}) for argument, default in pairs} | given
        for node in (node for node in ast.walk(function) if isinstance(node, ast.Assign)):
            targets, values = [node.targets[0]], [node.value]
            if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                targets, values = targets[0].elts, node.value.elts
            for target, value in zip(targets, values, strict=True):
                if isinstance(target, ast.Name) and target.id not in given:
                    names[target.id] = [*names.get(target.id, []), *self.texts(value, names)]
        return names

    def _expand(self, module: _Module, call: ast.Call, names: Names) -> Iterator[dict[str, str]]:
        """The texts of a call that makes a refusal, itself or through helpers."""
        name = _called(call)
        given = {key.arg: self.texts(key.value, names) for key in call.keywords if key.arg}
        if name in _KEYS:
            given |= {
                key: self.texts(a, names) for key, a in zip(_KEYS[name], call.args, strict=False)
            }
            texts = {"flag": [_FLAG_OF_A_KEY]} | {
                key: given.get(key, [BLANK]) for key in _KEYS[name]
            }
            texts.pop("value", None)
            for found in product(*texts.values()):
                yield {k: " ".join(v.split()) for k, v in zip(texts, found, strict=True)}
            return
        owner = module
        if name in module.imported and name not in module.helpers:
            owner = next((m for m in self.modules if name in m.helpers), module)
        helper = owner.helpers.get(name)
        if helper is None:
            return
        order = [argument.arg for argument in helper.args.args if argument.arg != "self"]
        given |= {key: self.texts(a, names) for key, a in zip(order, call.args, strict=False)}
        inner = self._assigned(helper, given)
        for returned in _returned_calls(helper):
            yield from self._expand(owner, returned, inner)


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _returns_text(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    """Tell whether a function says that it returns a `str`."""
    return isinstance(node, ast.FunctionDef) and getattr(node.returns, "id", None) == "str"


def _called(call: ast.Call) -> str:
    """The name of what is called, `f` of both `f(...)` and `self.f(...)`."""
    return str(getattr(call.func, "id", None) or getattr(call.func, "attr", ""))


def _returned_calls(function: ast.FunctionDef) -> list[ast.Call]:
    returns = (node.value for node in ast.walk(function) if isinstance(node, ast.Return))
    return [value for value in returns if isinstance(value, ast.Call)]


def _read(file: Path) -> _Module:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    helpers: dict[str, ast.FunctionDef] = {}
    for _ in range(2):  # a helper may call another one
        for function in _functions(tree):
            if {_called(call) for call in _returned_calls(function)} & {*_KEYS, *helpers}:
                helpers[function.name] = function
    froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    imported = {alias.name for node in froms for alias in node.names}
    return _Module(file.parent.name, file.stem, tree, helpers, imported)


def _rules() -> Iterator[Refusal]:
    """The refusals that are data: server flags and environment switches."""
    from sglang_sparse import bounded, checks, placed, windowed
    from sglang_sparse_radix import refusals

    holding_with = {
        "": (*refusals.RULES, *checks.ATTENTION_RULES),
        "`--enable-hierarchical-cache`": refusals.HOST_TIER_RULES,
        "`placement.kind` `host`": placed.PLACED_RULES,
        "`retention.kind` `cascade`": bounded.BOUNDED_RULES,
        "`retention.kind` `streaming_window`": windowed.WINDOWED_RULES,
    }
    for what, rules in holding_with.items():
        for rule in rules:
            yield Refusal(what, "rules", 0, rule.flag, rule.why, rule.allowed_text, rule.remedy)
    for switch, why in refusals._SWITCHES.items():
        yield Refusal("", "rules", 0, switch, why, "unset", f"unset {switch}")


@cache
def all_refusals() -> tuple[Refusal, ...]:
    """Every refusal, sorted by where it is raised."""
    return tuple(sorted({*_Source().refusals(), *_rules()}))
