"""`python -m vitrail`, and the `vitrail` command."""

from __future__ import annotations

import sys


def main() -> None:
    from vitrail.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
