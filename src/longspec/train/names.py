"""Names in a stage's folder, for those who read it without torch."""

STATUS = "status.json"
CHECKPOINTS = "checkpoints"
