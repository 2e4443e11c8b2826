"""FP8 formats and casts, on torch alone: used by the probe and, if they like, by training scripts."""
