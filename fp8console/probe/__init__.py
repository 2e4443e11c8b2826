"""Runs inside each training process: hooks, measurements, restore points, the link to the supervisor.

Standard library and torch only. Nothing here may raise into the training, print into its output, or make it wait for
anything but an operator's command.
"""
