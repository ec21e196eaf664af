"""The command ``attnspan``: one command a file, listed in `COMMANDS`.

A command is a module of this folder with three names::

    HELP: str                    one line for `attnspan --help`
    configure(parser) -> None    add the command's own arguments
    run(args) -> int             do it; the exit status (0 is fine)

To add one, write ``cli/NAME.py`` and put ``"NAME"`` into `COMMANDS`. Every command's module is
imported to list it, so a command imports what is heavy (torch, jax, matplotlib) inside ``run``.
An `AttnspanError` that ``run`` raises is printed in one line, without a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from attnspan.errors import AttnspanError

__all__ = ["COMMANDS", "main"]

COMMANDS = ("bench", "book", "doctor")


class Command(Protocol):
    """What a module of this folder provides."""

    HELP: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it and return the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the program's name; ``sys.argv[1:]`` where not given.

    Returns
    -------
    int
        The command's own status; 2 for a usage error, 1 for an error that attnspan explains.

    Examples
    --------
    >>> main(["--version"])
    attnspan ...
    0
    """
    commands = {name: cast(Command, import_module(f"attnspan.cli.{name}")) for name in COMMANDS}
    parser = _parser(commands)
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed the help or the error already
        return stop.code if isinstance(stop.code, int) else 0
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return commands[args.command].run(args)
    except AttnspanError as error:
        print(f"attnspan {args.command}: {error}", file=sys.stderr)
        return 1


def _parser(commands: dict[str, Command]) -> argparse.ArgumentParser:
    parser = _Parser(prog="attnspan", description="Attention: any score, any mask, one right answer.")
    parser.add_argument("--version", action=_Version, help="print the version and stop")
    listing = parser.add_subparsers(
        dest="command", title="commands", metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    for name, command in commands.items():
        command.configure(listing.add_parser(name, help=command.HELP, description=command.HELP))
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors end with the list of commands, not with a usage line alone."""

    def error(self, message: str) -> Any:
        self.print_help(sys.stderr)
        self.exit(2, f"\n{self.prog}: {message}\n")


class _Version(argparse.Action):
    """``--version``, read from the installed package only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import attnspan

        print(f"attnspan {attnspan.__version__}")
        parser.exit()
