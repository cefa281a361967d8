"""The entry point of the command line `kvplane`, also as `python -m kvplane_service`.

The base install of kvplane is the client that an engine carries; it has this entry point too, but not what the
commands import.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. A package that is not installed is reported as one line with the pip command."""
    try:
        from kvplane_service.cli import main as run

        run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing.startswith("kvplane"):
            raise
        sys.stderr.write(f"kvplane: this command needs {missing}: pip install 'kvplane[cli,service]'\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
