"""How a command ended, for whoever started it: 0 is done."""

DOES_NOT_HOLD = 1
BAD_INPUT = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
