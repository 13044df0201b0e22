"""Trainers by algorithm. Each has `train(options, run)`; `train.py` picks one by name."""
