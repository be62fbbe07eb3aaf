"""Renderers: frozen results in, text out. To add one, write a module that returns strings.

``json`` makes the documents of all commands. Texts for people are made by the command: ``text_inspect``,
``text_diff``, ``text_list``, ``text_changes`` for what changes files, and ``verdicts`` for ``verify``; they take
tables from ``tables``, numbers from ``numbers``, and from ``terminal`` styles and names that no terminal obeys.
``junit``, ``sarif`` and ``github`` are what a CI reads, ``plot`` draws, and ``plot_results`` says what.
"""
