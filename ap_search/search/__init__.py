"""Domains, rules, solver, ranking and explanation."""
