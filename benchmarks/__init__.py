"""The cost of simulated FP4: opt-in measurements, as ratios to the unquantized model in the same process and run.

    python -m benchmarks.targets       # the figures of docs/performance.md that have a target
    python -m benchmarks.linear        # one linear, beside other libraries
    python -m benchmarks.quantizers    # each quantizer alone, beside a copy
    python -m benchmarks.step          # a whole training step
    python -m benchmarks.first_step    # the time to the end of the first training step
    python -m benchmarks.memory        # bytes kept for the backward
    python -m benchmarks.techniques    # techniques at the optimizer's step
    python -m benchmarks.uncompiled    # a step that no compiler captures
    python -m benchmarks.statistics_cost  # a training with statistics
    python -m benchmarks.gpu_plan      # predicts reads, writes and launches of the program for a GPU
    python -m benchmarks.gpu_validate  # on a machine with a GPU: bits, parity, steps, memory, each switch both ways
    python -m benchmarks.report        # writes the tables of docs/performance.md from the files of results
    python -m benchmarks.zoo           # trains one step of many image models; writes docs/models.md

Run from the root of a clone, with ``pip install -e ".[bench]"``. Each benchmark prints a table and adds its rows to
``benchmarks/results/<benchmark>.<machine>.json``; docs/performance.md says how to read them.
"""
