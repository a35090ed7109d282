"""What jobs ask of a machine and how they are sent and tried again."""
