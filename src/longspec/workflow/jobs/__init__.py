"""What jobs ask of a machine and how they are sent, tried again and sealed."""
