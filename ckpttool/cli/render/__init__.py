"""Renderers: frozen results in, text out. To add one, write a module that returns strings.

Texts are made by ``text_inspect``, ``verdicts`` (verify), ``text_diff``, ``text_list``, and ``text_changes``
for the commands that change files, with the styles and tables of ``terminal``. ``junit``, ``sarif`` and
``github`` are for CI systems; ``plot_results`` makes pictures with ``integrations/matplotlib``.
"""
