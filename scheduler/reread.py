"""Which options a running daemon takes anew on SIGHUP, and which it cannot: decided here, carried out in daemon.py."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.option import Option
from scheduler.options import OPTIONS, Options


@dataclass(frozen=True, slots=True)
class Reread:
    """options: what runs from now on. taken, refused: a sentence for each option that differs."""

    options: Options
    taken: tuple[str, ...]
    refused: tuple[str, ...]


def reread(running: Options, told: Options) -> Reread:
    """What becomes of the options that a daemon runs with when it is told others."""
    taken, refused, new = [], [], {}
    for option in OPTIONS:
        old_value, value = getattr(running, option.field), getattr(told, option.field)
        if value == old_value:
            continue
        if option.reloads:
            new[option.field] = value
            taken.append(f"--{option.name} is {_shown(option, value)} now, and was {_shown(option, old_value)}")
        else:
            old, to = _shown(option, old_value), _shown(option, value)
            refused.append(f"--{option.name} stays {old}: {to} takes a restart")
    return Reread(dataclasses.replace(running, **new), tuple(taken), tuple(refused))


def _shown(option: Option, value: Any) -> str:
    if value is None or value == ():
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    text = option.kind.show(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
