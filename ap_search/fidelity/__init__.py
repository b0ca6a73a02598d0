"""Recorded runs against their prices: errors, order inside groups, feasibility."""
