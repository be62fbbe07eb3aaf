"""Moving and removing files so that a kill at any moment loses nothing: journal, steps, recovery."""
