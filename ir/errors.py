"""The two kinds of error a caller may handle; everything else is a bug."""

from __future__ import annotations


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
