"""The command line and the composition of the parts."""
