"""The example of a configuration, the page of options and the help are as the table of options is. That the first two
are up to date: tests/docs/test_layout_pages.py."""

import re
import tomllib

import pytest

from scheduler import cli
from scheduler.commands import reference
from scheduler.configuration import read_config
from scheduler.option import Option
from scheduler.options import OPTIONS
from tests.deploy.folder import DEPLOY

EXAMPLE = DEPLOY / "config.example.toml"


def test_the_example_is_a_configuration() -> None:
    assert read_config(str(EXAMPLE)) == {"model": "demo"}


def test_every_default_in_it_is_one() -> None:
    """Each commented line, taken in by itself, changes nothing."""
    found = re.findall(r"^#(\w+) = ([^<].*)$", EXAMPLE.read_text(), re.MULTILINE)
    by_field = {option.field: option for option in OPTIONS}
    assert {name for name, _ in found} == {
        option.field for option in OPTIONS if option.default is not None and not option.required
    }
    for name, value in found:
        option = by_field[name]
        assert option.kind.check(tomllib.loads(f"x = {value}")["x"]) == option.default, name


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_in_both(option: Option) -> None:
    assert f"`--{option.name}`" in reference.page()
    assert re.search(rf"^#?{option.field} = ", reference.example(), re.MULTILINE)


def test_the_help_has_every_option_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help"]) == 0
    listed = capsys.readouterr().out.partition("\noptions:\n")[2].partition("\nexamples:\n")[0]
    entries = re.split(r"^  (?=-)", re.sub(r"^\S.*:$", "", listed, flags=re.MULTILINE), flags=re.MULTILINE)
    _, _, _, *told = map(without_spaces, entries)  # nothing, --help and --config
    assert sorted(told) == sorted(without_spaces(flags_of(option) + option.described) for option in OPTIONS)


def flags_of(option: Option) -> str:
    """As argparse shows them."""
    if isinstance(option.default, bool):
        return f"--{option.name}, --no-{option.name}"
    more = f" [{option.metavar} ...]" if option.kind.is_list else ""
    return f"--{option.name} {option.metavar}{more}"


def without_spaces(text: str) -> str:
    """The help is folded, at hyphens too."""
    return re.sub(r"\s", "", text)
