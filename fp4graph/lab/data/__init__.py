"""The data that tasks train on."""
