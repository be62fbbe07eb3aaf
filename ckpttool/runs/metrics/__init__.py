"""What logs beside checkpoints measured, and which checkpoint each measurement belongs to."""
