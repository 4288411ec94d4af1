"""The cost of simulated FP4: opt-in measurements, as ratios to the unquantized model in the same process and run.

docs/performance.md lists the benchmarks and says how to read their figures. Further modules: ``gpu.plan`` predicts the
cost on a GPU, ``gpu.validate`` measures it on a card, and ``zoo`` trains one step of many image models. Run ``python -m
benchmarks.NAME`` from the root of a clone, with ``pip install -e ".[bench]"``. Most print a table and add its rows to
``benchmarks/results/<benchmark>.<machine>.json``.
"""
