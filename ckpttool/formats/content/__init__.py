"""What formats share: how content is taken apart, told, and kept."""
