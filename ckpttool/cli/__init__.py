"""The command line: one module per command, which parses, calls the library once, renders, and exits.

``run`` is the one place where errors become exit codes: 0 success, 1 something needs attention, 2 failure.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click

from ckpttool.cli.commands import Commands
from ckpttool.cli.output import (
    COMPLETE_VARIABLE,
    FAILED,
    FOUND_SOMETHING,
    INTERRUPTED,
    TERMINATED,
    Unwritable,
    choose_colour,
    discard,
    paged,
    say_error,
    streams,
)
from ckpttool.core.errors import CheckpointError, UsageError
from ckpttool.core.text import did_you_mean


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status, which doesn't depend on errors of writing stderr."""
    # During completion, output would end up in the command line being typed.
    is_completing = COMPLETE_VARIABLE in os.environ
    with streams(is_silent=is_completing), _interrupted_by_sigterm() as was_terminated:
        status = _run(arguments)
    return TERMINATED if status == INTERRUPTED and was_terminated() else status


@contextmanager
def _interrupted_by_sigterm() -> Iterator[Callable[[], bool]]:
    """Turn SIGTERM into KeyboardInterrupt; yield a function that returns whether it was received.

    Outside of the main thread, or if the process already has a handler, nothing is installed.
    """
    # SIGTERM's default action ends a process at once, without ``finally``: temporary files would be left, and
    # transactions would have to be recovered. As a KeyboardInterrupt, it takes the same way out as Ctrl-C,
    # and only the exit status differs: 143 instead of 130, as in a shell. Python lets only the main thread
    # install handlers, and a program that calls ``run`` keeps its own.
    was_terminated = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal was_terminated
        if not was_terminated:  # supervisors send it again: a second one must not interrupt the clean-up
            was_terminated = True
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield lambda: was_terminated
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield lambda: was_terminated
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(arguments: Sequence[str] | None) -> int:
    choose_colour("auto")
    try:
        status = _carry_out(sys.argv[1:] if arguments is None else [*arguments])
        # Flushed here, so that an error of writing the last bytes still has its exit status.
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except (CheckpointError, UsageError) as error:
        return _failed(error)
    except (KeyboardInterrupt, click.Abort):
        say_error("interrupted")
        return INTERRUPTED
    except Unwritable as error:
        discard(sys.stdout)
        return _failed(error)
    except BrokenPipeError:
        # The reader has closed the pipe, as ``| head`` does; Python ignores SIGPIPE, so that this is raised.
        # That needs no message, but isn't a success: the answer is cut. Buffered output is discarded, or
        # Python would write it at exit, fail again, and print a traceback.
        discard(sys.stdout)
        return FOUND_SOMETHING
    except click.ClickException as error:
        return _misused(error)
    except MemoryError as error:
        return _failed(error, "out of memory")
    except Exception as error:  # noqa: BLE001 - the last resort: a bug of ours is one line too
        return _failed(error, _unforeseen_text(error))


def _carry_out(arguments: list[str]) -> object:
    """Parse the command line and run its command; click's own ``main`` prints and exits by itself."""
    commands = Commands()
    if instruction := os.environ.get(COMPLETE_VARIABLE):
        from click.shell_completion import shell_complete

        return shell_complete(commands, {}, "ckpttool", COMPLETE_VARIABLE, instruction)
    try:
        with commands.make_context("ckpttool", arguments) as context:
            return commands.invoke(context)
    except click.exceptions.Exit as request:
        return request.exit_code


def _failed(error: Exception, text: str | None = None) -> int:
    if os.environ.get("CKPTTOOL_DEBUG") == "1":
        raise error
    say_error(text or error)
    return FAILED


def _unforeseen_text(error: Exception) -> str:
    # Relative paths fail with ENOENT after another process has removed the working directory, even if no
    # file is missing that the user named.
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except OSError:
            return "the working directory no longer exists"
    return f"internal error: {type(error).__name__}: {error} (CKPTTOOL_DEBUG=1 prints a traceback)"


def _misused(error: click.ClickException) -> int:
    context = getattr(error, "ctx", None)
    message = error.format_message()
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        with paged():
            print(message)
        return FAILED
    hint = f" (see '{context.command_path} --help')" if context is not None else ""
    if isinstance(error, click.NoSuchOption):
        message = f"no option {error.option_name}"
        params = () if context is None else context.command.params
        known = [flag for one in params for flag in (*one.opts, *one.secondary_opts)]
        if meant := did_you_mean(error.option_name, known):
            hint = f" ({meant})"
    say_error(f"{message.rstrip('.')}{hint}")
    return FAILED
