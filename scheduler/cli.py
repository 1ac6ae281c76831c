"""The command `laned`: finds the subcommand and turns what it raises into an exit status.

0: done. 1: it failed. 2: a mistake of the one who typed, with one sentence that says what to change. 130: interrupted.
Each command is imported when it is called, so that `laned ask` need not wait for what only `laned serve` uses.
"""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from scheduler.usage import Command, CommandFailed, Parser, UsageError, nearest


def _serve(argv: Sequence[str]) -> int:
    from scheduler import configuration

    parser = Parser(
        "serve",
        "Load one model and serve it to the clients of a Unix socket, all their requests decoded together.\n"
        "SIGTERM or ^C lets what runs finish, within --drain-timeout, and then ends the daemon. SIGHUP reads --config\n"
        "again and takes what a running daemon can; SIGUSR1 writes all stacks to standard error.",
        (
            "laned serve --model demo",
            "laned serve --model mlx-community/Qwen3-4B-4bit --max-rows 16 --metrics-port 9100",
            "laned serve --model ~/models/llama.gguf --socket /run/user/1000/llama.sock",
            "laned serve --config laned.toml --log-format json",
        ),
    )
    configuration.add_flags(parser)
    flags = parser.parse(argv)
    chosen = configuration.load(flags)
    from scheduler.daemon import serve

    return serve(chosen, lambda: configuration.load(flags))


def _ask(argv: Sequence[str]) -> int:
    from scheduler.commands import ask

    return ask.main(argv)


def _status(argv: Sequence[str]) -> int:
    from scheduler.commands import status

    return status.main(argv)


def _inspect(argv: Sequence[str]) -> int:
    from scheduler.commands import inspect

    return inspect.main(argv)


def _top(argv: Sequence[str]) -> int:
    from scheduler.commands import top

    return top.main(argv)


def _bench(argv: Sequence[str]) -> int:
    from scheduler.commands import bench

    return bench.main(argv)


def _doctor(argv: Sequence[str]) -> int:
    from scheduler.commands import doctor

    return doctor.main(argv)


def _gateway(argv: Sequence[str]) -> int:
    from scheduler.gateway import command

    return command.main(argv)


def _demo(argv: Sequence[str]) -> int:
    from scheduler.commands import demo

    return demo.main(argv)


def _store(argv: Sequence[str]) -> int:
    from scheduler.commands import store_commands

    return store_commands.main(argv)


def _install_service(argv: Sequence[str]) -> int:
    from scheduler.commands import install

    return install.install(argv)


def _uninstall_service(argv: Sequence[str]) -> int:
    from scheduler.commands import install

    return install.uninstall(argv)


def _completion(argv: Sequence[str]) -> int:
    from scheduler.commands import completion

    return completion.main(argv, _COMMANDS)


_COMMANDS: dict[str, tuple[str, Command]] = {
    "serve": ("load a model and serve it on a Unix socket", _serve),
    "ask": ("send a prompt to a running daemon and print the answer as it comes", _ask),
    "status": ("show what a running daemon is doing", _status),
    "top": ("watch a running daemon: rows, slots, rates and latencies, drawn anew every second", _top),
    "gateway": ("serve OpenAI's and Anthropic's HTTP APIs in front of a running daemon", _gateway),
    "inspect": ("load a model and tell how it would run here, and how many rows would fit", _inspect),
    "bench": ("load a model and measure how fast it is here, by rows and by length of prompt", _bench),
    "doctor": ("look at this machine as laned finds it, and say what to do about what is wrong", _doctor),
    "demo": ("start a daemon with a small model and send it eight prompts at once", _demo),
    "store": ("look at what daemons remember in a folder, check it, tidy it; keep it for several of them", _store),
    "install-service": ("write the files that make systemd or launchd run it here", _install_service),
    "uninstall-service": ("stop that service and remove its files", _uninstall_service),
    "completion": ("write a script that makes a shell complete all this", _completion),
}

_HELP = f"""usage: laned COMMAND [OPTIONS]

One language model, served by a daemon to many clients of a Unix socket.

commands:
{chr(10).join(f"  {name:<19}{summary}" for name, (summary, _) in _COMMANDS.items())}

  laned COMMAND --help explains a command; laned --version prints the versions.

examples:
  laned demo
  laned serve --model demo &
  laned ask "Why is the sky blue?"
"""


def _versions() -> str:
    found = []
    for package in ("laned", "mlx", "mlx-lm"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} (not installed)")
    return f"{found[0]} ({', '.join(found[1:])}, Python {sys.version.split()[0]})"


def _run(argv: Sequence[str]) -> int:
    if not argv:
        raise UsageError(f"A command is missing: {', '.join(_COMMANDS)}. `laned --help` explains them.")
    first, rest = argv[0], argv[1:]
    if first in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if first in ("-V", "--version"):
        print(_versions())
        return 0
    if first not in _COMMANDS:
        guess = nearest(first, _COMMANDS)
        hint = f"did you mean `laned {guess}`?" if guess else "`laned --help` lists the commands."
        raise UsageError(f"There is no command {first!r}: {hint}")
    return _COMMANDS[first][1](rest)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. What is nobody's mistake and not foreseen is raised."""
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        # What is still buffered may meet a closed pipe here, where that can be caught.
        sys.stdout.flush()
    except BaseException as error:
        match _innermost(error):
            case UsageError() as mistake:
                print(f"laned: {mistake}", file=sys.stderr)
                return 2
            case CommandFailed() as failure:
                print(f"laned: {failure}", file=sys.stderr)
                return 1
            case KeyboardInterrupt():
                return 130
            case BrokenPipeError():
                return _silence()
            case SystemExit(code=int(code)):  # argparse's --help
                return code
        raise
    return status


def _innermost(error: BaseException) -> BaseException:
    """The exception that Trio's nurseries have wrapped, if there is but one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _silence() -> int:
    """The reader of our output has gone, as in `laned ask ... | head -1`: end as a program that SIGPIPE ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


if __name__ == "__main__":
    sys.exit(main())
