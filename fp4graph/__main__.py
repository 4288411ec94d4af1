"""The entry point of the command ``fp4graph`` and of ``python -m fp4graph``."""

import sys

from fp4graph.errors import Error

try:
    from fp4graph.commands.app import app as app
    from fp4graph.commands.app import main as main
except Error as error:  # FP4GRAPH_KERNELS is read when kernels are imported
    sys.exit(str(error))

if __name__ == "__main__":
    main()
