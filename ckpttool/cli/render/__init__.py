"""Renderers: frozen results in, text out. To add one, write a module that returns strings.

``json`` makes the documents of all commands. What people read stands in ``text_inspect``, ``verdicts``
(verify), ``text_diff``, ``text_list``, and ``text_changes`` for the commands that change files; tables come
from ``tables``, numbers from ``numbers``, styles, and names that do no harm on a terminal, from
``terminal``. ``junit``, ``sarif`` and ``github`` are what a CI reads; ``plot_results`` makes pictures with
``integrations/matplotlib``.
"""
