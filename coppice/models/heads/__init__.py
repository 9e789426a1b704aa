"""Draft heads of the EAGLE family, and the layouts that they are published in."""
