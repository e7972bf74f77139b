"""Mutants: small wrong changes of the package, each with the tests that must notice it.

The files `*.toml` list them, one file for each subpackage. `python -m mutants` (`make mutants`) plants them one at a
time in a copy of the package and runs the named tests, which must fail.
"""
