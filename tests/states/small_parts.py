"""Run `python -m tests.states.small_parts ARGUMENTS`: longspec.states with some rows in a file."""

from longspec.states import __main__ as program
from longspec.states import build

if __name__ == "__main__":
    build.PART_BYTES = 600_000
    program.main()
