"""The entry point of the command line `kvplane`, also as `python -m kvplane_tools`.

The base install of kvplane is the client that an engine carries; it has this entry point too, but not what the
commands import.
"""

from __future__ import annotations

import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command line. A package that is not installed is reported as one line with the pip command for it.

    Characters that the encoding of the terminal or pipe does not have are printed as question marks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # in tests it is replaced
            stream.reconfigure(errors="replace")
    try:
        from kvplane_tools.cli import main as run

        run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing.startswith("kvplane"):
            raise
        from kvplane.base.installed import command_for

        sys.stderr.write(f"kvplane: this command needs {missing}: {command_for('cli,service')}\n")
        sys.exit(1)
    except KeyboardInterrupt:  # while the commands are imported
        sys.exit(130)


if __name__ == "__main__":
    main()
