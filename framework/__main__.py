"""`python -m framework` and the script `framework`: the command line as a program of its own."""

from __future__ import annotations

from collections.abc import Sequence

from framework.ending import install, is_of_signal, leave


def program(argv: Sequence[str] | None = None) -> None:
    """Runs one command line and ends with SystemExit as `cli.main` does; after a signal the process ends here."""
    install()  # first of all: the imports take a while
    from framework.cli import main

    try:
        main(argv)
    except SystemExit as end:
        if is_of_signal(end.code):
            assert isinstance(end.code, int)
            leave(end.code)
        raise


if __name__ == "__main__":
    program()
