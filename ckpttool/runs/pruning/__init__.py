"""From a directory to a plan, from a plan to what is left."""
