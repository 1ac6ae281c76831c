"""The options: every one by flag and by file, flags over file over default, and mistakes that say what to change."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from scheduler import configuration
from scheduler.connection import Limits
from scheduler.option import Option
from scheduler.options import OPTIONS, Options
from scheduler.usage import UsageError

# For each option two texts that a flag may have, and what they become.
EXAMPLES: dict[str, tuple[tuple[str, Any], tuple[str, Any]]] = {
    "model": (("demo", "demo"), ("org/name", "org/name")),
    "served-model-name": (("a", "a"), ("b c", "b c")),
    "chat-template": (("{{ a }}", "{{ a }}"), ("{% if a %}", "{% if a %}")),
    "chat-template-args": (('{"a": 1}', {"a": 1}), ("{}", {})),
    "max-model-len": (("2048", 2048), ("4096", 4096)),
    "dtype": (("float32", "float32"), ("BFloat16", "bfloat16")),
    "adapter": (("a=/x", {"a": "/x"}), ("/y/z=1", {"default": "/y/z=1"})),
    "max-tokens": (("7", 7), ("8", 8)),
    "temperature": (("0.5", 0.5), ("1", 1.0)),
    "top-p": (("0.5", 0.5), ("1", 1.0)),
    "top-k": (("0", 0), ("40", 40)),
    "min-p": (("0.05", 0.05), ("0", 0.0)),
    "max-rows": (("1", 1), ("64", 64)),
    "max-queue": (("0", 0), ("9", 9)),
    "kv-bits": (("4", 4), ("8", 8)),
    "kv-group-size": (("32", 32), ("128", 128)),
    "kv-cache-memory-bytes": (("2GiB", 2 << 30), ("1000000", 1_000_000)),
    "compile": (("on", "on"), ("OFF", "off")),
    "num-draft-tokens": (("0", 0), ("10", 10)),
    "prefill-step-size": (("64", 64), ("512", 512)),
    "max-stall-ms": (("20", 20.0), ("0.5", 0.5)),
    "drain-timeout": (("0", 0.0), ("2.5", 2.5)),
    "prompt-cache-bytes": (("0", 0), ("2GiB", 2 << 30)),
    "demote-idle": (("1", 1.0), ("600", 600.0)),
    "store": (("/var/a", "/var/a"), ("b", "b")),
    "store-max": (("1GiB", 1 << 30), ("5000000", 5_000_000)),
    "store-min-free": (("0", 0), ("1GiB", 1 << 30)),
    "store-queue-bytes": (("64MiB", 64 << 20), ("1GB", 10**9)),
    "restore": (("read", "read"), ("MAP", "map")),
    "store-socket": (("/run/s.sock", "/run/s.sock"), ("s.sock", "s.sock")),
    "socket": (("/run/a.sock", "/run/a.sock"), ("b.sock", "b.sock")),
    "allow-user": (("ada,bob", ("ada", "bob")), ("1000", ("1000",))),
    "allow-group": (("staff", ("staff",)), ("staff, 7", ("staff", "7"))),
    "hello-timeout": (("1", 1.0), ("0.5", 0.5)),
    "client-timeout": (("1", 1.0), ("0.5", 0.5)),
    "outbox-bytes": (("512KiB", 512 * 1024), ("2 MB", 2_000_000)),
    "max-requests-per-connection": (("1", 1), ("2", 2)),
    "metrics-port": (("0", 0), ("9100", 9100)),
    "metrics-host": (("::1", "::1"), ("localhost", "localhost")),
    "log-format": (("json", "json"), ("TEXT", "text")),
    "log-level": (("DEBUG", "debug"), ("error", "error")),
    "blas": (("off", "off"), ("/lib/libopenblas.so", "/lib/libopenblas.so")),
    "threads": (("1", 1), ("2", 2)),
}
SWITCHES = [option for option in OPTIONS if isinstance(option.default, bool)]
VALUED = [option for option in OPTIONS if option not in SWITCHES]


def parse(*flags: str) -> Options:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    configuration.add_flags(parser)
    given = list(flags)
    if "--model" not in given and "--config" not in given:
        given = ["--model", "demo", *given]
    return configuration.load(parser.parse_args(given))


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def write(path: Path, *lines: str) -> str:
    file = path / "laned.toml"
    file.write_text("\n".join(lines))
    return str(file)


def test_the_table_is_the_dataclass_and_every_line_is_complete() -> None:
    assert [option.field for option in OPTIONS] == [field.name for field in dataclasses.fields(Options)]
    names = [name for option in OPTIONS for name in (option.name, *option.aliases)]
    assert len(set(names)) == len(names)
    assert {option.name for option in VALUED} == set(EXAMPLES), "each option with a value has its examples above"
    for option in OPTIONS:
        assert option.group
        assert option.metavar or option in SWITCHES
        assert option.help[0].islower() or option.help.startswith(("Jinja", "Unix", "BLAS", "Python")), option.name
        assert not option.help.endswith("."), option.name
        if not option.required and option.default is not None and option.name != "chat-template-args":
            kind = option.kind
            assert kind.check(option.default) == option.default, "a default is a value that one could give"
            if option not in SWITCHES:
                assert kind.check(kind.read(kind.show(option.default))) == option.default, "and in the help's words"


@pytest.mark.parametrize("option", VALUED, ids=lambda option: option.name)
def test_flag_over_file_over_default(option: Option, tmp_path: Path) -> None:
    (one_text, one), (other_text, other) = EXAMPLES[option.name]
    assert one != other
    if not option.required:
        assert getattr(parse(), option.field) == option.default
    for name in (option.name, *option.aliases):
        assert getattr(parse(f"--{name}", one_text), option.field) == one
        assert getattr(parse(f"--{name}={other_text}"), option.field) == other
        for key in {name, name.replace("-", "_")}:
            lines = [f"{key} = {toml(other)}"] if option.required else ['model = "demo"', f"{key} = {toml(other)}"]
            path = write(tmp_path, *lines)
            assert getattr(parse("--config", path), option.field) == other
            assert getattr(parse("--config", path, f"--{name}", one_text), option.field) == one


@pytest.mark.parametrize("option", SWITCHES, ids=lambda option: option.name)
def test_a_switch_is_set_and_unset_from_either_side(option: Option, tmp_path: Path) -> None:
    assert getattr(parse(), option.field) is False
    assert getattr(parse(f"--{option.name}"), option.field) is True
    for value in (True, False):
        path = write(tmp_path, 'model = "demo"', f"{option.name} = {str(value).lower()}")
        assert getattr(parse("--config", path), option.field) is value
        assert getattr(parse("--config", path, f"--{option.name}"), option.field) is True
        assert getattr(parse("--config", path, f"--no-{option.name}"), option.field) is False


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max-rows", "0"),
        ("max-rows", "many"),
        ("max-rows", "1.5"),
        ("max-tokens", "0"),
        ("temperature", "-0.1"),
        ("temperature", "nan"),
        ("temperature", "inf"),
        ("top-p", "0"),
        ("top-p", "1.01"),
        ("min-p", "2"),
        ("top-k", "-1"),
        ("dtype", "int8"),
        ("log-format", "xml"),
        ("metrics-port", "65536"),
        ("outbox-bytes", "many"),
        ("outbox-bytes", "0"),
        ("outbox-bytes", "1i"),
        ("outbox-bytes", "9MiB"),
        ("chat-template-args", "[1]"),
        ("chat-template-args", "{"),
        ("chat-template", "/no/such/template.jinja"),
        ("served-model-name", " "),
        ("client-timeout", "0"),
        ("drain-timeout", "-1"),
    ],
)
def test_a_bad_flag_is_named_with_what_it_takes(name: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(f"--{name}={text}")
    said = str(caught.value)
    (option,) = (option for option in OPTIONS if option.name == name)
    assert said == f"--{name} takes {option.kind.noun}, not {text!r}."


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('max-rows = "8"', "'max-rows' in {file} takes a whole number from 1 to 4096, not '8'."),
        ("max_rows = 8.0", "'max_rows' in {file} takes a whole number from 1 to 4096, not '8.0'."),
        ("max_rows = true", "'max_rows' in {file} takes a whole number from 1 to 4096, not 'true'."),
        ("temperature = false", "'temperature' in {file} takes a number from 0 to 100, not 'false'."),
        ("temperature = nan", "'temperature' in {file} takes a number from 0 to 100, not 'NaN'."),
        ('log-prompts = "yes"', "'log-prompts' in {file} takes true or false, not 'yes'."),
        ("socket = 5", "'socket' in {file} takes a path, not '5'."),
        ("socket = [1979-05-27]", "'socket' in {file} takes a path, not '[\"1979-05-27\"]'."),
        ("max-row = 8", "Unknown key 'max-row' in {file}; did you mean 'max-rows'?"),
        ("prefill_step = 8", "Unknown key 'prefill_step' in {file}; did you mean 'prefill-step-size'?"),
        ("zzz = 8", "Unknown key 'zzz' in {file}: `laned serve --help` lists the options."),
        ("max-rows = 8\nmax_rows = 8", "'max-rows' stands twice in {file} (once as 'max_rows'): keep one."),
        ("max-rows = 8\nmax-num-seqs = 8", "'max-rows' stands twice in {file} (once as 'max-num-seqs'): keep one."),
    ],
)
def test_a_bad_key_is_named_with_the_file(line: str, part: str, tmp_path: Path) -> None:
    path = write(tmp_path, line)
    with pytest.raises(UsageError) as caught:
        parse("--config", path)
    assert str(caught.value) == part.replace("{file}", path)


def test_a_file_that_is_no_toml_or_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Cannot read --config .*none: No such file or directory\."):
        parse("--config", str(tmp_path / "none"))
    path = write(tmp_path, "max-rows: 8")
    with pytest.raises(UsageError, match=r"is not valid TOML: .*line 1"):
        parse("--config", path)
    (tmp_path / "laned.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not valid TOML"):
        parse("--config", path)


def test_several_adapters_each_by_its_name(tmp_path: Path) -> None:
    flags = parse("--adapter", "a=/x", "--lora-modules", "b=/y", "c=~/z", "--adapter-path", "/w").adapter
    assert flags == {"a": "/x", "b": "/y", "c": str(Path.home() / "z"), "default": "/w"}
    relative = parse("--config", write(tmp_path, 'model = "demo"', "[adapter]", 'a = "x"')).adapter
    assert relative == {"a": str(Path("x").absolute())}
    for twice in (["a=/x", "a=/y"], ["/x", "/y"], ["=/x"], ["a="]):
        with pytest.raises(UsageError, match="--adapter takes NAME=FOLDER, each name once"):
            parse("--adapter", *twice)


def test_no_model_is_a_mistake_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--model is missing: it takes .* words demo and hybrid\."):
        parse("--config", write(tmp_path, "max-rows = 4"))


def test_a_template_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert parse("--chat-template", str(file)).chat_template == "{{ messages }}"


def test_the_limits_of_a_connection_are_the_connections_own() -> None:
    options, limits = parse(), Limits()
    assert options.hello_timeout == limits.hello_s
    assert options.client_timeout == limits.stalled_s
    assert options.outbox_bytes == limits.outbox_bytes
    assert options.max_requests_per_connection == limits.requests


def test_options_cannot_be_changed() -> None:
    made = parse("--chat-template-args", '{"a": 1}')
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.max_rows = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        made.chat_template_args["a"] = 2  # type: ignore[index]
