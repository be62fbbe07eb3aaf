"""PaddlePaddle: Fluid's directories, programs with their parameters, and pickles of ``paddle.save``.

=====================================  ==================================================================
On disk                                Read by
=====================================  ==================================================================
``checkpoint_<n>/``                    ``fluid``: a serial of a training run; ``fluid_serial`` reads its
                                       trainers and lookup tables, ``fluid_writer`` writes one
``__model__`` (file) and variables     ``fluid``: an inference model
``<x>.pdmodel`` or ``<x>.json``, with  ``files``: a program, and all of its parameters in one file or in
``<x>.pdiparams`` or pickles           the pickles of ``paddle.static.save``
``<x>.pdparams``, ``<x>.pdopt``        ``pickles``: state dicts; the format's class, ``PaddlePickle``, is in
                                       ``ckpttool.formats.pickles``, next to those of other pickles
=====================================  ==================================================================

``program`` reads the programs of Paddle 1 and 2, ``pir`` those of Paddle 3; both yield the records of
``operators``, which finds the kind of layer of each parameter and summarises the computation. The binary
stream of one tensor is in ``ckpttool.containers.lodtensor``.
"""
