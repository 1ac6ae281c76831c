"""What an option is: a field of a frozen dataclass with what is needed for its flag, its key and its documentation."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from scheduler.values import Kind


@dataclass(frozen=True, slots=True)
class Option:
    """A line of the table. name and aliases are written with dashes; field is the name in the dataclass. reloads:
    whether a running daemon takes a new value from its file on SIGHUP."""

    name: str
    field: str
    kind: Kind
    default: Any
    required: bool
    metavar: str
    help: str
    group: str
    aliases: tuple[str, ...]
    reloads: bool

    @property
    def described(self) -> str:
        """The help with the default and the other names."""
        said = self.help
        if type(self.default) in (int, float, str):
            said += f" (default: {self.kind.show(self.default)})"
        if self.aliases:
            said += "; also " + ", ".join(f"--{alias}" for alias in self.aliases)
        return said


def option(
    kind: Kind,
    default: Any,
    group: str,
    metavar: str,
    help: str,
    aliases: tuple[str, ...] = (),
    required: bool = False,
    reloads: bool = False,
) -> Any:
    """A field."""
    metadata = {"kind": kind, "group": group, "metavar": metavar, "help": help, "aliases": aliases, "reloads": reloads}
    if required:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default_factory=lambda: default, metadata=metadata)


def table_of(options: type) -> tuple[Option, ...]:
    """One for each of a dataclass's fields."""
    table = []
    for field in dataclasses.fields(options):
        required = field.default_factory is dataclasses.MISSING
        default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        name = field.name.replace("_", "-")
        table.append(Option(name, field.name, default=default, required=required, **field.metadata))
    return tuple(table)
