"""What a verb's output may hold."""

import re

OBEYED = re.compile(r"[\0-\x09\x0b-\x1f\x7f-\x9f\udc80-\udcff]")  # the last: bytes that are no UTF-8


def control_characters(output: bytes) -> list[str]:
    """The characters of an output that a terminal obeys, line ends apart."""
    return OBEYED.findall(output.decode("utf-8", "surrogateescape"))
