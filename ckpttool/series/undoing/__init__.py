"""The trash, and taking back what was done."""
