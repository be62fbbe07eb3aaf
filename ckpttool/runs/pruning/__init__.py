"""``prune``: plans, protections, removal and slimming."""
