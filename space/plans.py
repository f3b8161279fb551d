"""A plan as a user names it: a file, or a preset."""

from __future__ import annotations

from pathlib import Path

from ir.documents import read_document
from ir.errors import InputError
from ir.plan import Plan
from ir.rules import Setting, check
from space.presets import presets


def load_plan(text: str | None, setting: Setting) -> Plan:
    """The plan in the file `text`, or the preset of that name; None for the first preset that is legal.

    Raises:
        InputError: neither a file nor a preset, or a plan that breaks a rule.
    """
    if text is not None and (text.endswith(".toml") or Path(text).exists()):
        plan = read_document(Path(text), Plan)
        check(plan, setting, where=text)
        return plan
    found = presets(setting)
    if not found:
        raise InputError("plan", "must be given, for no preset is legal here")
    if text is None:
        return next(iter(found.values()))
    if text not in found:
        raise InputError("plan", f"must be a file or one of the presets that are legal here: {', '.join(found)}", text)
    return found[text]
