"""The arguments that a launch script gives, read without running it.

Scripts set variables, collect arguments in arrays and then start one long command. That
much of bash is understood: assignments, defaults, sums, arrays, here-documents into a
variable. A variable that the script does not set stays as it is written.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ir.errors import InputError

_ARRAY = re.compile(r"(?:export |declare -a |local )?\s*(\w+)(\+?)=\((.*)\)\s*$", re.DOTALL)
_ASSIGNMENT = re.compile(r"(?:export |local |readonly )?\s*(\w+)(\+?)=(?!\()(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^{}]*))?\})")
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_HEREDOC = re.compile(r"^read .*?(\w+) <<-?\s*['\"]?(\w+)['\"]?[^\n]*\n(.*?)^\s*\2\s*$", re.DOTALL | re.MULTILINE)
_ENDS = ("|", "||", "&&", "&", ";", ">", ">>", "2>&1", "2>", "<")
_REST = ("$@", "${@}", "$*", "${@:1}")
"""What the script itself is given."""

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def words(text: str, where: str) -> list[str]:
    """Arguments of the command that a script launches, or those that a plain list of arguments holds.

    Args:
        text: The script: of its commands with `python -m MODULE` or `FILE.py`, the one with most arguments counts. Or
            arguments, one or more a line, with `#` comments.
        where: Its name, for errors.

    Raises:
        InputError: it has no such arguments, or quotes that do not close.
    """
    try:
        launched = _command(text)
        found = _listed(text) if launched is None else launched
    except ValueError as error:
        raise InputError(where, f"must be a script whose quotes close ({error})") from error
    if not found:
        raise InputError(where, "must start a command `python -m MODULE ...` or list its arguments")
    return found


def _command(text: str) -> list[str] | None:
    """The longest of the commands that a script launches; None if it launches none."""
    script = _Script()
    commands = [command for statement in _statements(_unfolded(text)) if (command := script.read(statement))]
    launched = [found for command in commands if (found := _launched(command)) is not None]
    return max(launched, key=len, default=None)


def _listed(text: str) -> list[str]:
    """Arguments, one or more a line; none where the first is a bare word."""
    found = [word for line in text.splitlines() for word in shlex.split(line, comments=True)]
    plain = all(word.startswith("-") or "=" in word or not word.isidentifier() for word in found[:1])
    return found if plain else []


def _launched(command: list[str]) -> list[str] | None:
    """What follows the module or file that python runs, up to a pipe or redirection."""
    end = next((i for i, word in enumerate(command) if word in _ENDS), len(command))
    command = command[:end]
    for i, word in enumerate(command):
        before = command[i - 1] if i else ""
        # A file may also be what a flag is given, where there is a list of arguments alone.
        if before in ("-m", "--module") or (word.endswith(".py") and not before.startswith("--")):
            return [word for word in command[i + 1 :] if word not in _REST]
    return None


def _unfolded(text: str) -> str:
    """Continued lines joined, and comment lines between them dropped."""
    kept = "\n".join(line for line in text.splitlines() if not re.match(r"\s*#", line))
    return re.sub(r"\\[ \t]*\n", " ", kept + "\n")


def _statements(text: str) -> Iterator[str]:
    """Statements, where what is in quotes or in the parentheses of an array may go over several lines."""
    for heredoc in _HEREDOC.finditer(text):
        yield f"{heredoc[1]}={shlex.quote(' '.join(heredoc[3].split()))}"
    pending = ""
    for line in _HEREDOC.sub("", text).splitlines():
        pending = f"{pending}\n{line}" if pending else line
        if _is_whole(pending):
            yield from (part for part in [pending.strip()] if part)
            pending = ""
    if pending.strip():
        yield pending.strip()


def _is_whole(text: str) -> bool:
    if re.match(r"\s*(?:\w+ )*\w+\+?=\(", text):
        bare = re.sub(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", "", text, flags=re.DOTALL)
        bare = re.sub(r"(?<=\s)#[^\n]*", "", bare)
        return bare.count("(") <= bare.count(")")
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


@dataclass(slots=True)
class _Script:
    """Variables and arrays as statements are read in turn."""

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)

    def read(self, statement: str) -> list[str]:
        """Take in an assignment, or give the words of a command."""
        if array := _ARRAY.match(statement):
            before = self.arrays.get(array[1], []) if array[2] else []
            self.arrays[array[1]] = before + self._split(array[3])
            return []
        assignment = _ASSIGNMENT.match(statement)
        if assignment and len(value := self._split(assignment[3])) <= 1:
            before_text = self.variables.get(assignment[1], "") if assignment[2] else ""
            self.variables[assignment[1]] = before_text + "".join(value)
            return []
        return self._split(statement)

    def _split(self, text: str) -> list[str]:
        found: list[str] = []
        for word in shlex.split(self._filled(text), comments=True):
            array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", word)
            found += self.arrays.get(array[1], []) if array else [word]
        return found

    def _filled(self, text: str) -> str:
        """With the values of variables and sums, where they are known."""
        for _ in range(10):
            filled = _SUM.sub(self._sum, _VARIABLE.sub(self._value, text))
            if filled == text:
                break
            text = filled
        return text

    def _value(self, match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        value = self.variables.get(name, default)
        return match[0] if value is None else value

    def _sum(self, match: re.Match[str]) -> str:
        # Inside a sum a variable needs no dollar.
        text = re.sub(r"[A-Za-z_]\w*", lambda name: self.variables.get(name[0], name[0]), match[1])
        try:
            return str(_evaluated(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]


def _evaluated(node: ast.expr) -> int:
    """A sum of whole numbers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    raise ValueError("not a sum of whole numbers")
