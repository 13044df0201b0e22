"""The compiled physics of docs/physics.md, one module per part of the paper. Pure functions over the arrays of `World`."""
