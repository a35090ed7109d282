"""Records in, packed rows out."""
