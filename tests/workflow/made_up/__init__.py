"""A draft method that the house does not know: what docs/code.md tells to write, copied into a copy of the workflow."""
