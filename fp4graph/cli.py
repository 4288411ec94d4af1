"""The entry point of the command ``fp4graph``."""

from fp4graph.commands.app import app as app
from fp4graph.commands.app import main as main
