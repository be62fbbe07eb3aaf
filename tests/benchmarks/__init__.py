"""Speed and memory of ckpttool against what people would use instead, as ratios of one run.

``python -m tests.benchmarks`` measures; docs/background/performance.md says how, and keeps the last table.
"""
