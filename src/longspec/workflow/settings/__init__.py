"""What a person has written, config/workflow.yaml and the runs it names: read, and held against what there is."""
