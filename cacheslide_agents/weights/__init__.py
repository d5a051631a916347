"""Model folders as files: what is in them, what tells two of them apart, how they are written."""
