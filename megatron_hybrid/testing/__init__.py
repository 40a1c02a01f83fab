"""Shipped test support: an independent oracle of the numerics, seeded inputs and exact assertions."""
