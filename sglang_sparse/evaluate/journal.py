# SPDX-License-Identifier: Apache-2.0
"""Results measured so far, one a line, so that an interrupted evaluation can be resumed."""

import json
import threading
from pathlib import Path
from typing import Any

from sglang_sparse.config import ConfigError

Key = tuple[str, int, int, str]  # task, length, index, arm


class Journal:
    """`journal.jsonl` and `settings.json` of one output folder."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Open `folder`, and read the results that an earlier run left there.

        Raises:
            ConfigError: it cannot be made, or holds an evaluation with other settings.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"it cannot be made ({error.strerror})"
            allowed = "a folder, new or of an earlier run"
            raise _refused(folder, problem, allowed, "name another one") from error
        self._path, kept = folder / "journal.jsonl", folder / "settings.json"
        if kept.exists() and self._read(kept, kept.read_bytes()) != settings:
            raise _refused(
                folder,
                "it holds an evaluation with other settings, or of another server",
                "a new folder, or the settings in its settings.json",
                "name another folder",
            )
        kept.write_text(json.dumps(settings, indent=1) + "\n")
        self._lock = threading.Lock()
        self._entries: dict[Key, dict[str, Any]] = {}
        text = self._path.read_bytes() if self._path.exists() else b""
        if text and not text.endswith(b"\n"):
            # A run was killed while it wrote its last line.
            text = text[: text.rfind(b"\n") + 1]
            self._path.write_bytes(text)
        for line in text.splitlines():
            entry = self._read(self._path, line)
            self._entries[self._key(entry)] = entry

    @staticmethod
    def _read(path: Path, text: bytes) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except ValueError as error:
            found = error
        fields = ("task", "length", "index", "arm") if path.suffix == ".jsonl" else ()
        if not isinstance(found, dict) or any(field not in found for field in fields):
            problem = f"{path.name} in it is damaged"
            allowed = "a folder, new or of an earlier run"
            remedy = f"remove {path}, or name another folder"
            raise _refused(path.parent, problem, allowed, remedy)
        return found

    @staticmethod
    def _key(entry: dict[str, Any]) -> Key:
        return entry["task"], entry["length"], entry["index"], entry["arm"]

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def add(self, key: Key, **values: Any) -> None:
        """Append one result."""
        entry = dict(zip(("task", "length", "index", "arm"), key, strict=True)) | values
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            self._entries[key] = entry

    def entries(self) -> list[dict[str, Any]]:
        """Everything so far."""
        return list(self._entries.values())


def _refused(folder: Path, problem: str, allowed: str, remedy: str) -> ConfigError:
    return ConfigError(
        flag="--out", value=str(folder), problem=problem, allowed=allowed, remedy=remedy
    )
