"""The command line: one file a command. Parse, one call, render, exit.

``run`` is the one place where errors become exit codes: 0 all is well, 1 something needs a
look, 2 it could not be done.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import typer
import typer.main

from ckpttool.cli.commands import Commands
from ckpttool.cli.options import ColourChoice
from ckpttool.cli.output import (
    COULD_NOT,
    FOUND_SOMETHING,
    INTERRUPTED,
    TERMINATED,
    Colour,
    choose_colour,
    paged,
    say_error,
)
from ckpttool.cli.streams import Unwritable, discard, streams
from ckpttool.core.errors import CheckpointError, UsageError

_CLICK_ERROR: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

app = typer.Typer(
    name="ckpttool",
    cls=Commands,
    help="Inspect, verify, compare, convert and prune machine-learning checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(context: typer.Context, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from importlib.metadata import version

        print(f"ckpttool {version('ckpttool')}")
        raise typer.Exit()


@app.callback()
def _ckpttool(
    version: bool = typer.Option(
        False, "--version", "-V", callback=_print_version, is_eager=True, help="Print the version."
    ),
    color: ColourChoice = None,
) -> None:
    pass


@cache
def _command() -> Callable[..., object]:
    """Return what parses the command line: to make it takes longer than most commands do."""
    return typer.main.get_command(app)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; whether stderr can be written has no say in it."""
    # During completion, output would end up in the command line being typed.
    is_completing = os.environ.get("_CKPTTOOL_COMPLETE", "").startswith("complete_")
    with streams(is_silent=is_completing), _interrupted_by_sigterm() as has_come:
        status = _run(arguments)
    return TERMINATED if status == INTERRUPTED and has_come() else status


@contextmanager
def _interrupted_by_sigterm() -> Iterator[Callable[[], bool]]:
    """Turn SIGTERM into KeyboardInterrupt; yield a function that returns whether it was received.

    Outside of the main thread, or if the process has a handler of its own, nothing is installed.
    """
    has_come = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal has_come
        if not has_come:  # supervisors send it again: a second one must not interrupt the clean-up
            has_come = True
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield lambda: has_come
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield lambda: has_come
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(arguments: Sequence[str] | None) -> int:
    choose_colour(Colour.AUTO)
    try:
        given = None if arguments is None else [*arguments]
        status = _command()(args=given, prog_name="ckpttool", standalone_mode=False)
        sys.stdout.flush()
        if status == INTERRUPTED:  # what Typer makes of Ctrl-C
            raise KeyboardInterrupt
        return status if isinstance(status, int) else 0
    except (CheckpointError, UsageError) as error:
        return _failed(error)
    except (KeyboardInterrupt, typer.Abort):
        say_error("interrupted")
        return INTERRUPTED
    except Unwritable as error:
        discard(sys.stdout)
        return _failed(error)
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing may be written when Python closes it.
        discard(sys.stdout)
        return FOUND_SOMETHING
    except _CLICK_ERROR as error:
        return _misused(error)
    except MemoryError as error:
        return _failed(error, "there is not enough memory")
    except Exception as error:  # noqa: BLE001 - the last resort: a bug of ours is one line too
        return _failed(error, _unforeseen_text(error))


def _failed(error: Exception, text: str | None = None) -> int:
    if os.environ.get("CKPTTOOL_DEBUG") == "1":
        raise error
    say_error(text or str(error))
    return COULD_NOT


def _unforeseen_text(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except OSError:
            return "the working directory no longer exists"
    return f"internal error: {type(error).__name__}: {error} (CKPTTOOL_DEBUG=1 shows where)"


def _misused(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    message: str = error.format_message()  # type: ignore[attr-defined]  # every ClickException has it
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        with paged():
            print(message)
        return COULD_NOT
    hint = f" (see '{context.command_path} --help')" if context is not None else ""
    say_error(f"{message.rstrip('.')}{hint}")
    return COULD_NOT
