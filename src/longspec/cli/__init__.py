"""`longspec`: one command for what a person does with a run and its draft."""
