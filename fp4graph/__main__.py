"""The entry point of the command ``fp4graph`` and of ``python -m fp4graph``."""

from fp4graph.commands.app import app as app
from fp4graph.commands.app import main as main

if __name__ == "__main__":
    main()
