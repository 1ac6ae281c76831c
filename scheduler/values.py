"""The kinds of value that an option may have: how each is read from a flag's text or a TOML file, and checked."""

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value. noun: what is expected, to follow the word "takes" in a message.

    read: from a flag's text to the value that a TOML file would hold. check: from that value to the option's.
    Both raise ValueError or TypeError for what does not fit. show: from the option's value to a flag's text. is_list: a
    flag may be given several times, with several texts, and check gets all of them. choices: all texts that fit, where
    these are few.
    """

    noun: str
    read: Callable[[str], object]
    check: Callable[[Any], Any]
    show: Callable[[Any], str] = str
    is_list: bool = False
    choices: tuple[str, ...] = ()


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError


def whole(minimum: int, maximum: int | None = None) -> Kind:
    def check(value: Any) -> int:
        _require(type(value) is int and minimum <= value and (maximum is None or value <= maximum))
        return int(value)

    span = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return Kind(f"a whole number {span}", int, check)


def number(noun: str, fits: Callable[[float], bool]) -> Kind:
    def check(value: Any) -> float:
        _require(type(value) in (int, float) and math.isfinite(value) and fits(value))
        return float(value)

    return Kind(noun, float, check, lambda value: f"{value:g}")


def seconds() -> Kind:
    return number("a number of seconds above 0", lambda value: value > 0)


def text(noun: str) -> Kind:
    def check(value: Any) -> str:
        _require(isinstance(value, str) and value.strip() != "")
        return str(value)

    return Kind(noun, str, check)


def names(noun: str) -> Kind:
    """Several words: with commas between them in a flag, a list in a file."""

    def check(value: Any) -> tuple[str, ...]:
        _require(isinstance(value, list | tuple) and all(isinstance(name, str) and name.strip() for name in value))
        return tuple(name.strip() for name in value)

    return Kind(noun, lambda text: text.split(",") if text else [], check, ",".join)


def named_folders(unnamed: str) -> Kind:
    """NAME=FOLDER, or FOLDER alone, which gets the name `unnamed`; in a file, a table. Paths become absolute."""

    def check(value: Any) -> Mapping[str, str]:
        _require(isinstance(value, list | Mapping))
        pairs = list(value.items()) if isinstance(value, Mapping) else [_named_folder(text, unnamed) for text in value]
        for name, folder in pairs:
            _require(isinstance(folder, str) and folder != "" and 0 < len(name) <= 128)
        _require(len(dict(pairs)) == len(pairs))
        return MappingProxyType({name: os.path.abspath(os.path.expanduser(folder)) for name, folder in pairs})

    def show(value: Any) -> str:
        return " ".join(f"{name}={folder}" for name, folder in value.items())

    return Kind("NAME=FOLDER, each name once (in a file, a table)", str.split, check, show, is_list=True)


def _named_folder(text: str, unnamed: str) -> tuple[str, str]:
    name, is_named, folder = text.partition("=")
    return (name, folder) if is_named and "/" not in name else (unnamed, text)


def choice(*choices: str) -> Kind:
    def check(value: Any) -> str:
        _require(isinstance(value, str) and value.lower() in choices)
        return str(value).lower()

    return Kind(f"{', '.join(choices[:-1])} or {choices[-1]}", str, check, choices=choices)


def one_of_numbers(*choices: int) -> Kind:
    def check(value: Any) -> int:
        _require(type(value) is int and value in choices)
        return int(value)

    texts = tuple(map(str, choices))
    return Kind(f"{', '.join(texts[:-1])} or {texts[-1]}", int, check, choices=texts)


def switch() -> Kind:
    def check(value: Any) -> bool:
        _require(isinstance(value, bool))
        return bool(value)

    return Kind("true or false", lambda word: {"true": True, "false": False}[word], check)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def _show_size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


def size(most_bytes: int, least_bytes: int = 1) -> Kind:
    def check(value: Any) -> int:
        match = re.fullmatch(r"(\d+) ?([kmg]?i?)b?", str(value).lower())
        _require(type(value) in (int, str) and match is not None)
        assert match is not None
        _require(match[2] in _UNITS)
        num_bytes = int(match[1]) * _UNITS[match[2]]
        _require(least_bytes <= num_bytes <= most_bytes)
        return num_bytes

    return Kind(f"a size of at most {most_bytes >> 20}MiB, such as 1048576, 512KiB or 1MB", str, check, _show_size)


def json_map() -> Kind:
    def check(value: Any) -> Mapping[str, Any]:
        _require(isinstance(value, dict))
        return MappingProxyType(value)

    return Kind("a JSON object (in a file, a table)", json.loads, check)


def template() -> Kind:
    def check(value: Any) -> str:
        _require(isinstance(value, str) and value.strip() != "")
        # Every template that prints anything holds a brace, and hardly a file's name does.
        if "{" in value:
            return str(value)
        try:
            with open(os.path.expanduser(value), encoding="utf-8") as file:
                return file.read()
        except OSError as error:
            raise ValueError from error

    return Kind("a Jinja template or the name of a readable file that holds one", str, check)
