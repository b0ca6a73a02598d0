"""Calibration: the few constants that recorded runs identify, fitted, judged on groups left out, written down."""
