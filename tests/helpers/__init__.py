"""Shared code of the tests: rank pools, the reference trainer, small models."""
