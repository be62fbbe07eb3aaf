"""Retention: the request, its rules, and plans as pure functions of a survey."""
