"""What the rules ask: typed functions that know nothing of Snakemake and raise ValueError with the key at fault."""
