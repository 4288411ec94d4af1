"""First-party techniques, one per file, found through the same entry points as anybody's."""
