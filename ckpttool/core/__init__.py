"""What every room builds on: bytes that can be read anywhere, and a tensor's elements as lazy values."""
