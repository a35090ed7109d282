"""Names in a shard's folder. No torch."""

JOURNAL = "journal.jsonl"  # a line for each record that is done
PRINTED = "server.log"  # what the server prints that the job has started
SERVED = "served_model"  # the key under which a shard says what its server calls the model that answered
