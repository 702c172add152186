"""Tests of the REST service."""
