"""`python -m lightning_zero.cli`, for where the script is not on the path."""

from __future__ import annotations

from lightning_zero.cli import main

if __name__ == "__main__":
    main()
