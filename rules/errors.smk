# How a mistake of a user is told.

import sys
from contextlib import contextmanager

from snakemake.logging import logger


@contextmanager
def told_in_one_line():
    """End the command with what is wrong. Of an exception Snakemake would print its own frames and those of rules/ too."""
    try:
        yield
    except ValueError as error:
        logger.error(str(error))
        sys.exit(1)
