"""The two kinds of error a caller may handle; everything else is a bug."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")


class InputError(ValueError):
    """A user's mistake: where it is, the rule, and what was got. Printed as one sentence, exit code 2."""

    def __init__(self, where: str, rule: str, got: object = None) -> None:
        super().__init__(where, rule, got)
        self.where = where
        self.rule = rule
        self.got = got

    def __str__(self) -> str:
        suffix = "" if self.got is None else f", got {self.got}"
        return f"{self.where}: {self.rule}{suffix}"


class Infeasible(Exception):
    """A plan that cannot run, with the reason: data for a search, never its end."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(kind, reason)
        self.kind = kind
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


def nearest(rule: str, name: str, known: Iterable[str]) -> str:
    """A rule that a name breaks, with the known name that is nearest to it, if one is near."""
    close = get_close_matches(name, list(known), n=1)
    return f"{rule}, such as {close[0]}" if close else rule


def chosen(name: str, options: Mapping[str, T], where: str) -> T:
    """The option of that name.

    Raises:
        InputError: there is none.
    """
    if name not in options:
        close = get_close_matches(name, options, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(where, f"must be one of {', '.join(options)}{hint}", repr(name))
    return options[name]
