"""Renderers: frozen results in, text out. To add one, write a module that returns strings.

``text_inspect``, ``verdicts`` (verify), ``text_diff``, ``text_list`` and ``text_changes`` (commands that
change files) are for terminals, with the styles and tables of ``terminal``. ``junit``, ``sarif`` and
``github`` are for CI systems; ``plot_results`` draws pictures with ``integrations/matplotlib``.
"""
