"""The compiled physics of docs/physics.md, one module per part of the paper: functions over the arrays of `World`."""
