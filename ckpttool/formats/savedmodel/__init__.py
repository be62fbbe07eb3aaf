"""TensorFlow's SavedModel: its graph, its objects, its variables."""
