"""The live side: the same decision as in the gym, on real workers."""
