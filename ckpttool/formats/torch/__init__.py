"""PyTorch's files: ``torch.save`` of all ages, TorchScript, exported programs, distributed jobs, DeepSpeed.

All kinds but safetensors share three steps. The pickle machine (``containers/pickle``) reads a pickle into
inert nodes, so nothing is imported or called. ``objects.py`` turns the nodes that ``torch._utils`` would
rebuild into tensors: a type, a shape, and a view (offset, strides) of a storage; ``distributed.py`` does so
for ``DTensor`` and ``ShardedTensor``, and ``types.py`` has PyTorch's element types and layouts. A class for
each container finds the bytes of the storage that a persistent id names.

One file:

- ``zip.py``: ``torch.save`` since 1.6. A zip with the object in ``data.pkl``, and each storage in a record
  ``data/<key>``.
- ``legacy.py``: ``torch.save`` before 1.6. Five pickles, then the storages, without a directory.
- ``tar.py``: ``torch.save`` before 0.1.10. A tar whose members hold storages, views of them, and the object.
- ``torchscript.py``: ``torch.jit.save``. As ``zip.py``, with a second pickle of constants and the model's
  code, which ``torchscript_code.py`` cuts into tokens and judges; ``torch_operators.py`` knows PyTorch's own
  operators.
- ``export.py``: ``torch.export.save``. A graph as JSON, and each tensor in a record; ``expressions.py``
  judges the texts of the graph that Python evaluates.
- ``stable_baselines.py``: a zip of settings as JSON and files of ``torch.save``.

One directory, or the files of one save:

- ``dcp.py``: ``torch.distributed.checkpoint``. ``dcp_metadata.py`` reads ``.metadata``, which places the
  chunks of each tensor; ``dcp_items.py`` opens a chunk, which is a whole file of ``torch.save``.
- ``dcp_safetensors.py``: the same with a safetensors file of each rank, and no ``.metadata``.
- ``ranks_format.py``: a file of ``torch.save`` of each rank, recognised by name (``rank_files.py``);
  ``ranks.py`` opens the files and assembles their tensors.
- ``deepspeed.py``: a directory of DeepSpeed's; ``deepspeed_zero.py`` joins the parts of ZeRO.

Writing: ``writer.py`` writes the zip, ``dcp_writer.py`` the distributed checkpoint. ``tree_nodes.py`` keeps
PyTorch's objects in the content tree (``Checkpoint.tree``), from which they are written again.
"""
