"""Read what a person has written, config/workflow.yaml and the runs it names, and check it against what exists."""
