"""What is to stay and what is to go, and why: pure functions of what was found."""
