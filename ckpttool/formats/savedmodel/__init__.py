"""TensorFlow's SavedModel: a directory with a graph, its variables, assets and signatures.

``saved_model.pb`` holds one or more meta graphs: a GraphDef (nodes, and a library of functions of nodes),
signatures that callers may ask for, a SaverDef, assets, and since TensorFlow 2 the graph of Python objects.
The values of the variables are a tensor bundle, ``variables/variables``. It is read like this:

1. ``directory.py`` recognises the directory; ``layout.py`` has the names in it. ``reader.py`` opens it. 2.
``walk.py`` steps through the message where it is in the file; ``pbtext.py`` converts ``saved_model.pbtxt``
to
   the binary form first.
3. ``graph.py`` makes a ``MetaGraph`` of each meta graph, in one pass over its nodes. ``objects.py`` reads the
   object graph.
4. The bundle is opened as a TensorFlow checkpoint. ``variables.py`` compares its tensors with the variables
in
   the object graph, gives them readable names and Keras's layers, and checks ``fingerprint.pb``.
5. ``safety.py`` reports what loading the model would do besides computing. An op that opens files is harmless
   if it serves the saver only (``saver.py``) or opens only the model's own files (``file_names.py``);
   ``ops.py`` knows the ops, from ``lists/``.
6. ``computation.py`` makes the digests of what the model computes, for ``diff``.

``writer.py`` writes models that hold variables only, without a graph.
"""
