"""What lies in a directory, and which of it a path means."""
