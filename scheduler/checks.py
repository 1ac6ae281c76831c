"""What a field of a message may hold: small checks, made once per field, that name the field in what they raise.

A check takes the field's name and the value that came from the wire, and returns the value for the message (arrays
become tuples, whole numbers floats where a float is meant), or raises Refused("bad_request"). A boolean is never a
number here, although Python thinks so.
"""

import math
from collections.abc import Callable
from typing import Any, NoReturn

from scheduler.errors import Refused

Check = Callable[[str, Any], Any]

MAX_ID_CHARS = 128
MAX_NAME_CHARS = 64
MAX_TOKEN_ID = 2**31 - 1


def refuse(message: str) -> NoReturn:
    raise Refused("bad_request", message)


def shown(value: object) -> str:
    """A value as an error message shows it: short, and of containers the kind alone."""
    if isinstance(value, list | dict | tuple):
        return f"{'a map' if isinstance(value, dict) else 'an array'} of {len(value)}"
    if isinstance(value, bytes):
        return "binary"
    if isinstance(value, str) and len(value) > 40:
        return repr(value[:40]) + "..."
    if value is None:
        return "nil"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def text(least: int = 0, most: int | None = None) -> Check:
    """A string of `least` to `most` characters."""

    def check(name: str, value: Any) -> str:
        if type(value) is not str:
            refuse(f"{name} must be a string, not {shown(value)}")
        if len(value) < least:
            refuse(f"{name} is empty")
        if most is not None and len(value) > most:
            refuse(f"{name} is {len(value)} characters long, the most is {most}")
        return value

    return check


def absolute_path(most: int) -> Check:
    """The name of a file or a folder, from the root on, as another process has it."""
    string = text(1, most)

    def check(name: str, value: Any) -> Any:
        if not string(name, value).startswith("/"):
            refuse(f"{name} must be an absolute path, not {shown(value)}")
        return value

    return check


def integer(low: int, high: int, hint: str = "") -> Check:
    """An integer of [low, high]; the hint is added where one is refused."""

    def check(name: str, value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            refuse(f"{name} must be an integer from {low} to {high}, not {shown(value)}{hint}")
        return value

    return check


def number(low: float, high: float, hint: str = "") -> Check:
    """A finite number of [low, high], as a float."""
    bounds = f" of at least {low:g}" if math.isinf(high) else f" from {low:g} to {high:g}"
    said = "" if math.isinf(low) else bounds

    def check(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high or math.isinf(value):
            refuse(f"{name} must be a finite number{said}, not {shown(value)}{hint}")
        return float(value)

    return check


def share(name: str, value: Any) -> float:
    """A number of (0, 1]."""
    if type(value) not in (int, float) or not 0 < value <= 1:
        refuse(f"{name} must be a number above 0 and at most 1, not {shown(value)}: 1 switches it off")
    return float(value)


def one_of(*words: str) -> Check:
    def check(name: str, value: Any) -> str:
        if type(value) is not str or value not in words:
            refuse(f"{name} must be one of {', '.join(words)}, not {shown(value)}")
        return value

    return check


def flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        refuse(f"{name} must be true or false, not {shown(value)}")
    return value


def identity(name: str, value: Any) -> str | int:
    """What a client calls a request by: its own choice, and given back as it came."""
    if isinstance(value, int | str) and type(value) is not bool and value != "" and len(str(value)) <= MAX_ID_CHARS:
        return value
    refuse(f"{name} must be an integer or a string of 1 to {MAX_ID_CHARS} characters, not {shown(value)}")


def text_or_token(name: str, value: Any) -> str | int:
    if isinstance(value, int | str) and type(value) is not bool:
        return value
    refuse(f"{name} must be a string or a token id, not {shown(value)}")


def mapping(most: int) -> Check:
    """A map of at most `most` keys, whatever its values: they are its reader's to judge."""

    def check(name: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) > most:
            refuse(f"{name} must be a map of at most {most} keys, not {shown(value)}")
        return value

    return check


def token_biases(most: int) -> Check:
    """A map of at most `most` token ids, in digits as a map's keys are text, to numbers of [-100, 100]."""
    bias = number(-100, 100)

    def check(name: str, value: Any) -> dict[str, float]:
        if type(value) is not dict or len(value) > most:
            refuse(f"{name} must be a map of at most {most} token ids, not {shown(value)}")
        for key in value:
            if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
                refuse(f"{name} has the key {shown(key)}, which is no token id")
        return {str(int(key)): bias(f"{name}[{key}]", entry) for key, entry in value.items()}

    return check


def array(item: Check, least: int, most: int) -> Check:
    """An array of `least` to `most` items, each checked, as a tuple."""

    def check(name: str, value: Any) -> tuple[Any, ...]:
        _sized(name, value, least, most)
        return tuple([item(f"{name}[{index}]", entry) for index, entry in enumerate(value)])

    return check


def text_or_array(item: Check, most: int) -> Check:
    """One string, or an array of them: always a tuple afterwards."""
    several = array(item, 0, most)

    def check(name: str, value: Any) -> tuple[str, ...]:
        return (item(name, value),) if type(value) is str else several(name, value)

    return check


def token_ids(least: int, most: int) -> Check:
    """An array of token ids, as a tuple. Whether they are in the vocabulary is for one who has a vocabulary.

    A prompt may have a million: they are checked by what runs in C, and one by one only to name the culprit.
    """
    one = integer(0, MAX_TOKEN_ID)

    def check(name: str, value: Any) -> tuple[int, ...]:
        _sized(name, value, least, most)
        if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_TOKEN_ID):
            for index, entry in enumerate(value):
                one(f"{name}[{index}]", entry)
        return tuple(value)

    return check


def _sized(name: str, value: Any, least: int, most: int) -> None:
    if type(value) is not list:
        refuse(f"{name} must be an array, not {shown(value)}")
    if len(value) < least:
        refuse(f"{name} is empty")
    if len(value) > most:
        refuse(f"{name} has {len(value)} items, the most is {most}")
