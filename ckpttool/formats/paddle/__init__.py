"""Paddle: Fluid's directories, inference models, and pickles."""
