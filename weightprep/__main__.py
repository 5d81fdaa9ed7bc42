"""The command line: what the script `weightprep` and `python -m weightprep` start.

The commands are imported where an interruption is already told of as one: that import takes half a second.
"""

from __future__ import annotations

import json
import sys

from weightprep.errors import Interrupted

__all__ = ["main"]


def main() -> None:
    """Run the command line on sys.argv and exit."""
    try:
        from weightprep.cli import app

        app(prog_name="weightprep")
    except KeyboardInterrupt:
        error = Interrupted("weightprep")
        if "--json" in sys.argv:
            print(json.dumps({"schema": "weightprep.error/1", "error": error.describe()}, indent=2))
        print(f"interrupted; {error.remedy}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
