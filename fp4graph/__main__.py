"""``python -m fp4graph`` is the command ``fp4graph``."""

from fp4graph.cli import main

main()
