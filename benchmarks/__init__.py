"""What simulating costs: opt-in measurements, each a ratio to the unquantized model in the same process and run.

    python -m benchmarks.targets       # what docs/performance.md promises, beside what this machine does
    python -m benchmarks.linear        # one linear, beside other libraries
    python -m benchmarks.quantizers    # each quantizer alone, beside a copy
    python -m benchmarks.step          # a whole training step
    python -m benchmarks.first_step    # the time until the first one is done
    python -m benchmarks.memory        # bytes kept for the backward
    python -m benchmarks.techniques    # what acts at the optimizer's step
    python -m benchmarks.uncompiled    # a step that no compiler captures
    python -m benchmarks.statistics_cost  # a training with statistics
    python -m benchmarks.gpu_plan      # no cost: what the program for a GPU would read and write, predicted
    python -m benchmarks.gpu_validate  # on a machine with a GPU: bits, parity, steps, memory, each switch both ways
    python -m benchmarks.report        # the tables of docs/performance.md, from the files of results
    python -m benchmarks.zoo           # no cost: which image models train; it writes docs/models.md

Run from the root of a clone, with ``pip install -e ".[bench]"``. Each prints a table and adds its rows to
``benchmarks/results/<benchmark>.<machine>.json``; docs/performance.md says how to read them.
"""
