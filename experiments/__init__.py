"""The figures and tables of Mooncake's papers, ours beside theirs: `python -m experiments`.

One module per table or figure, named for the paper and what it shows; `experiment.py` says what such a module holds,
`paper.yaml` has the papers' numbers, `parameters.yaml` what they leave out.
"""
