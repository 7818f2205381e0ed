"""The command line, the same for every script: a parser, what flags take, one line for a problem, a bar for progress."""

import argparse
import contextlib
import math
import os
import re
import sys
from pathlib import Path


class Problem(ValueError):
    """Something the reader can put right. Scripts print it as one line and exit with 1."""


def reason(error):
    """Why a file could not be read or written, in a few words."""
    return getattr(error, "strerror", None) or error


def main_guard(main):
    """Run a script's `main`; a `Problem` becomes one line on stderr."""
    try:
        main()
        sys.stdout.flush()
    except Problem as problem:
        wipe()
        sys.exit(f"{Path(sys.argv[0]).name}: {' '.join(str(problem).split())}")
    except KeyboardInterrupt:
        wipe()
        sys.exit(130)
    except BrokenPipeError:  # what it was piped to has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line too."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def wipe():
    """Make room for a line where a bar may stand."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def say(line):
    """A line on stdout, in the place of a bar that may stand there."""
    wipe()
    print(line, flush=True)


def progress(done, total, note=""):
    """A bar on stderr, redrawn in place until `wipe`; silent where stderr is a file."""
    if sys.stderr.isatty():
        share = min(1.0, done / max(total, 1e-9))
        bar = ("#" * int(30 * share)).ljust(30, ".")
        print(f"\r[{bar}] {share:4.0%} {note}\x1b[K", end="", file=sys.stderr, flush=True)


def kind(convert, holds, wanted):
    """An argparse type: text that `convert` takes and for which `holds`; the complaint says what was wanted."""

    def read(text):
        with contextlib.suppress(ValueError):
            if holds(value := convert(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return read


minutes = kind(float, lambda value: 0 < value < math.inf, "a number of minutes above 0")
weight = kind(
    lambda text: float(text) + 0.0,  # -0 becomes 0, and names the same run
    lambda value: 0 <= value < math.inf,
    "a finite number of 0 or more",
)
share = kind(lambda text: float(text) + 0.0, lambda value: 0 <= value <= 1, "a number from 0 to 1")
positive = kind(int, lambda value: value > 0, "a whole number of 1 or more")
name = kind(str, re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}").fullmatch, "a plain name: 100 letters, digits, dots, dashes at most")
output = kind(Path, lambda path: not path.is_dir(), "a file: it is a folder")
several = kind(int, lambda value: value > 1, "a whole number of 2 or more")
whole = kind(int, lambda value: 0 <= value < 2**32, "a whole number from 0 to 4294967295")
