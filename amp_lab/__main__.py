"""The command line: `python -m amp_lab doctor` and its sisters."""

import argparse
import sys
from importlib import import_module

# Each module adds one command with its function `add_command(subparsers)`.
COMMANDS = ("doctor", "cli_audit", "measurements")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m amp_lab", description="Tools of the course on mixed precision."
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f".{name}", __package__).add_command(subparsers)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
