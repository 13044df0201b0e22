"""Protocol buffers; `python -m runtime.proto` makes the modules anew from conductor.proto."""
