"""What every command does alike: bad input is one line on stderr and exit status 2."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from vlkv.errors import InputError


class OneLineParser(argparse.ArgumentParser):
    """argparse, but an error is one line."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong and exits with 2."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def guarded(command: Callable[[], Any]) -> int:
    """Runs a command and prints what it returns; bad input is one line on stderr and status 2."""
    try:
        result = command()
    except (InputError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if result is not None:
        print(result if isinstance(result, str) else json.dumps(result, indent=2))
    return 0
