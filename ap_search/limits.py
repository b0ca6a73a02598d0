"""The largest figures that a call takes: shared by the command line and what it calls."""

MAX_DEVICES = 2**20
MAX_GLOBAL_BATCH = 2**24
MAX_SEQ_LEN = 2**24
MAX_REDUNDANT_EXPERTS = 2**16
MAX_GIB = 1_000_000
MAX_TOP = 1000
MAX_STEPS = 1000
MAX_SEED = 2**32 - 1
MAX_TIMEOUT_S = 86_400
