"""The ledger of known bugs: which cases are expected to fail, why, where that is followed, and until when.

A case of the ledger that fails is skipped in the class ``known-bug``, with its verdict in the record. One that passes,
and an entry past its date, keep the run from being green. How an entry is written: ``suites/expectations/README.md``.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["DEFAULT_FOLDER", "Expectation", "Ledger", "load"]

#: Relative to pytest's root.
DEFAULT_FOLDER = "suites/expectations"
_REQUIRED = ("id", "case", "reason", "link", "expires")
_OPTIONAL = ("began",)
_TABLE = "expect"


@dataclass(frozen=True)
class Expectation:
    """One known bug.

    Attributes:
        id: its name, unique in the ledger.
        case: pattern of case ids, in which ``*`` stands for anything and nothing else is special.
        reason: what is wrong, in a line.
        link: where it is followed.
        expires: the last day on which it is an excuse.
        began: pattern of the hook where the failure must begin; another failure of the same case is no known bug.
        file: the ledger's file it stands in.
        expired: whether that day is over.
    """

    id: str
    case: str
    reason: str
    link: str
    expires: date
    began: str = "*"
    file: str = ""
    expired: bool = False

    def matches(self, case: str) -> bool:
        """Whether it is about this case."""
        return _like(self.case, case)

    def excuses(self, verdicts: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the case's failure is the one that is known: every failed comparison began at such a hook.

        And nothing is wrong that no comparison with the reference says: an edit that was not reverted, a row that it
        should not have reached, a token, bits that differ.
        """
        if self.began == "*":
            return True
        details = [entry.get("detail") or {} for entry in verdicts]
        if any(one.get("unjudged") or one.get("differing") for one in details):
            return False
        found = [entry["verdict"] for entry in verdicts if entry.get("verdict")]
        hooks = [(one.get("divergence") or {}).get("hook", "") for one in found if not one.get("passed")]
        return bool(hooks) and all(_like(self.began, str(hook)) for hook in hooks)

    @property
    def sentence(self) -> str:
        """The reason with what a person needs to follow it."""
        return f"{self.reason} ({self.id}, {self.link}, until {self.expires.isoformat()})"

    def to_json(self) -> dict[str, Any]:
        """For the record."""
        return {**vars(self), "expires": self.expires.isoformat()}


@dataclass(frozen=True)
class Ledger:
    """All known bugs of a run."""

    entries: tuple[Expectation, ...] = ()

    def of(self, case: str) -> Expectation | None:
        """The first entry about this case that is still an excuse."""
        return next((one for one in self.entries if not one.expired and one.matches(case)), None)


def load(folder: Path, today: date | None = None) -> Ledger:
    """Read every ``*.toml`` of the ledger.

    Raises:
        UsageError: there is no such folder, or an entry cannot be read: the file, the key and the way out.
    """
    if not folder.is_dir():
        msg = f"--expectations {str(folder)!r} is no folder: name one with *.toml files, or leave the option out"
        raise UsageError(msg)
    today = today or datetime.now(tz=UTC).date()
    entries: dict[str, Expectation] = {}
    for path in sorted(folder.glob("*.toml")):
        for one in _entries(path, today):
            if one.id in entries:
                msg = f"{path}: key 'id': {one.id!r} stands in {entries[one.id].file} too; give this one another name"
                raise UsageError(msg)
            entries[one.id] = one
    return Ledger(tuple(entries.values()))


def _entries(path: Path, today: date) -> Iterator[Expectation]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        msg = f"{path} cannot be read as TOML: {error}; put it right, or take it out of the folder"
        raise UsageError(msg) from error
    for key, value in found.items():
        if key != _TABLE or not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            msg = f"{path}: key {key!r}: an entry of the ledger is a table [[{_TABLE}]]; write it so"
            raise UsageError(msg)
    for number, table in enumerate(found.get(_TABLE, ()), start=1):
        yield _entry(path, f"{path}, entry {number}", table, today)


def _entry(path: Path, where: str, table: Mapping[str, Any], today: date) -> Expectation:
    known = ", ".join((*_REQUIRED, *_OPTIONAL))
    for key in table:
        if key not in (*_REQUIRED, *_OPTIONAL):
            msg = f"{where}: key {key!r}: there is no such key; there are {known}"
            raise UsageError(msg)
    for key in _REQUIRED:
        if key not in table:
            msg = f"{where}: key {key!r}: it is missing; an entry needs {', '.join(_REQUIRED)}"
            raise UsageError(msg)
    for key, value in table.items():
        if key != "expires" and not (isinstance(value, str) and value.strip()):
            msg = f"{where}: key {key!r}: {value!r} is not text; write some between quotes"
            raise UsageError(msg)
    if not re.match(r"https?://\S+$", table["link"]):
        msg = f"{where}: key 'link': {table['link']!r} is no link; write one that begins with https://"
        raise UsageError(msg)
    expires = table["expires"]
    if type(expires) is not date:
        msg = f"{where}: key 'expires': {expires!r} is no date; write one without quotes, as 2027-01-31"
        raise UsageError(msg)
    return Expectation(**table, file=path.name, expired=today > expires)


def _like(pattern: str, text: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text, re.DOTALL) is not None
