"""The REST service: what a user talks to."""
