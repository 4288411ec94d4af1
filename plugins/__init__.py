"""The shipped techniques, one per file, found through entry points like any other plugin."""
