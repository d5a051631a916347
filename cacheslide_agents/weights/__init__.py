"""Model folders as files: what is in them, and what tells two of them apart."""
