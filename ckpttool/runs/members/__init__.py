"""What a series is made of: checkpoints, what each needs and says, and in which order they come."""
