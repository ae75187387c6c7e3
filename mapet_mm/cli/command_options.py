"""A command's options as a dataclass, of which its command line and its Python function are two faces.

A field's annotation says what its option means. `parse_options` makes the command line of the fields; the
values of either face are read and checked by the dataclass itself.
"""

import argparse
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_type_hints

from mapet_mm.utils.errors import UserError


class OptionError(UserError):
    """A value that an option cannot have, or options that exclude each other."""


class Kind(NamedTuple):
    """What the value of an option is."""

    read: Callable[[Any], Any]  # of a text or a value in Python; ValueError or TypeError if it is none
    words: str  # for the message then: it "must be" this
    metavar: str | None = None


def _as_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(value)
    return value


FLAG = Kind(_as_flag, "True or False")  # without a value on the command line
TEXT = Kind(str, "a text")


def _path(value: Any) -> Path:
    """A path; `~/` is the home folder, which a shell puts in, and Python does not."""
    text = os.fspath(value)
    return Path(text).expanduser() if text.startswith("~/") else Path(text)


PATH = Kind(_path, "a path")


def one_of(*names: str) -> Kind:
    """One of these names."""
    words = f"{', '.join(names[:-1])} or {names[-1]}"
    return Kind(lambda value: names[names.index(value)], words, f"{{{','.join(names)}}}")


def whole_number(words: str, fits: Callable[[int], bool]) -> Kind:
    """A whole number for which `fits` is true; `words` say which."""

    def read(value: Any) -> int:
        found = int(value) if isinstance(value, str) else operator.index(value)
        return _require(found, fits)

    return Kind(read, words)


def number(words: str, fits: Callable[[float], bool]) -> Kind:
    """A number for which `fits` is true; `words` say which."""
    return Kind(lambda value: _require(float(value), fits), words)


def _require(value: Any, fits: Callable[[Any], bool]) -> Any:
    if not fits(value):
        raise ValueError(value)
    return value


@dataclass(frozen=True)
class Option:
    """What an option means; it annotates a field of a class of `Options`.

    Args:
        kind: of its value.
        meaning: for the help and the pages; without the default.
        default: in words, if the field's default does not say it.
        metavar: stands for the value in the help; or a word for each of several values.
        is_positional: given without its name on a command line.
        num_values: of an option of several values, which are a tuple; "+" for one or more.
        recorded: if what was made keeps the value, with which it must be continued: "never" if it does not
            decide what is computed; "if given" if there was a time before this option, without which what was
            made then goes on.
    """

    kind: Kind
    meaning: str
    default: str = ""
    metavar: str | None = None
    is_positional: bool = False
    num_values: int | Literal["+"] | None = None
    recorded: Literal["always", "if given", "never"] = "if given"

    def read(self, flag: str, value: Any) -> Any:
        """The option's value, of a text or a value in Python; OptionError if it cannot be."""
        is_one = self.num_values is None or isinstance(value, str)
        values = [value] if is_one else value
        try:
            found = tuple(self.kind.read(each) for each in values)
        except (ValueError, TypeError) as error:
            raise OptionError(f"{flag} must be {self.kind.words}, not {value!r}") from error
        if self.num_values is None:
            return found[0]
        if not found or (self.num_values != "+" and len(found) != self.num_values):
            raise OptionError(f"{flag} takes {self.num_values} values, not {len(found)}")
        return found


# Options of more than one command.
COUNT = whole_number("1 or more", lambda count: count >= 1)
WORKERS = Option(
    whole_number("0 or more", lambda count: count >= 0),
    "processes that load images",
    "one a core, up to 4",
    recorded="never",
)
SEED = Option(
    whole_number("from 0 to 4294967295", lambda seed: 0 <= seed < 2**32),
    "seed of all random numbers",
    recorded="always",
)


class NamedOption(NamedTuple):
    """An option of a class, and its field."""

    name: str
    default: Any  # MISSING if it has to be given
    option: Option

    @property
    def flag(self) -> str:
        """Its name on a command line: '--batch-size'."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def metavar(self) -> str:
        """What stands for its value; empty of one that has none."""
        if self.option.kind is FLAG:
            return ""
        return self.option.metavar or self.option.kind.metavar or self.name.upper()

    @property
    def default_words(self) -> str:
        """The default; empty of an option that is off or has to be given."""
        if self.option.default:
            return self.option.default
        is_off = self.default is MISSING or self.default is None or self.default is False
        return "" if is_off else str(self.default)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options whose values are read and checked, from a command line or from Python.

    Raises:
        OptionError: a value that cannot be.
    """

    def __post_init__(self) -> None:
        for one in options_of(type(self)):
            value = getattr(self, one.name)
            if value is not None:
                object.__setattr__(self, one.name, one.option.read(one.flag, value))

    def recorded(self) -> dict[str, Any]:
        """The values that whatever is made of them keeps, by name."""
        kept = {}
        for one in options_of(type(self)):
            value = getattr(self, one.name)
            is_given = value != one.default
            if one.option.recorded == "always" or (one.option.recorded == "if given" and is_given):
                kept[one.name] = value
        return kept


AnyOptions = TypeVar("AnyOptions", bound=Options)


def options_of(kind: type[Options]) -> Iterator[NamedOption]:
    """The options of a class in the order of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        (option,) = hints[one.name].__metadata__
        yield NamedOption(one.name, one.default, option)


def parse_options(kind: type[AnyOptions], arguments: Sequence[str], command: str, about: str) -> AnyOptions:
    """The options on a command line; SystemExit with a message if they cannot be.

    Args:
        kind: the class of the options.
        arguments: words of the command line.
        command: for the messages: 'mapet-mm pretrain'.
        about: for the help.
    """
    by_line = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(command, description=about, formatter_class=by_line)
    for one in options_of(kind):
        _add(parser, one)
    given = vars(parser.parse_args(arguments))
    try:
        return kind(**given)
    except OptionError as error:
        parser.error(str(error))


def _add(parser: argparse.ArgumentParser, one: NamedOption) -> None:
    """Add an option to a command line, whose texts the dataclass reads."""
    about = one.option.meaning
    if one.default_words:
        about += f" (default: {one.default_words})"
    settings: dict[str, Any] = dict(help=about.replace("%", "%%"))
    if not one.metavar:
        parser.add_argument(one.flag, action="store_true", **settings)
        return
    of_each = tuple(one.metavar.split())
    metavar = of_each if len(of_each) == one.option.num_values else one.metavar
    settings.update(metavar=metavar, nargs=one.option.num_values)
    if one.option.is_positional:
        parser.add_argument(one.name, **settings)
    elif one.default is MISSING:
        parser.add_argument(one.flag, required=True, **settings)
    else:
        parser.add_argument(one.flag, default=one.default, **settings)


def options_table(kind: type[Options]) -> str:
    """The options for a page, a row each, in Markdown."""
    rows = ["| option | meaning | default |", "| --- | --- | --- |"]
    for one in options_of(kind):
        if not one.option.is_positional:
            shown = f"`{f'{one.flag} {one.metavar}'.strip()}`"
            cells = [shown, one.option.meaning, one.default_words]
            rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"
