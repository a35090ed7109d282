"""Decide what jobs ask of a machine, and how they are submitted and retried."""
