"""Checks of a machine: plain functions from what is there to findings. Standard library only, never torch."""
