"""The example of a configuration and the page of options are as the table of options is. That they are up to date:
tests/docs/test_layout_pages.py."""

import re
import tomllib

import pytest

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
