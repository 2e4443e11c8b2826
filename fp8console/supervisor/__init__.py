"""The daemon of one run: starts the training, agrees commands over its ranks, keeps events, outlives the terminal."""
