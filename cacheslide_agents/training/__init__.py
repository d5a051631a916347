"""Turning a RoPE model into a CoPE model, and calibrating CCPE on it."""
