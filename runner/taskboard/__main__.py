"""`python -m taskboard` is the command `taskboard`."""

from taskboard.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
