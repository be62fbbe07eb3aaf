"""Renderers: frozen results in, text out. To add one, write a module that returns strings."""
