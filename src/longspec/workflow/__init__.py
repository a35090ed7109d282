"""Functions that the Snakemake rules call. They import nothing of Snakemake and raise ValueError with the key at fault."""
