"""Operations an adapter calls and a target may replace: one file an operation.

A file holds the torch reference and, where a target has a better one, the custom operator and the rule that chooses it.
"""
