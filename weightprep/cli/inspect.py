"""x"""

from weightprep.cli.output import command


@command
def inspect() -> int | None:
    """x"""
    return None
